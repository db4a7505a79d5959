"""The Hopfield layer: projections around a retrieval."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike, Bool, Float

from uhop_jax._checks import (
    as_numbers,
    check_choice,
    check_count,
    check_floating,
    check_key,
    check_positive,
    check_rate,
    check_rngs,
    check_sizes,
)
from uhop_jax.layers.association import HEAD_AXES, Association, map_head_axis
from uhop_jax.layers.dropout import dropped
from uhop_jax.layers.features import LinearFeatures, as_kernel
from uhop_jax.layers.masks import combined_mask, extended_mask
from uhop_jax.model import Model
from uhop_jax.retrieval import converge, energy, retrieve
from uhop_jax.separation import (
    Entmax,
    Separation,
    bounded_alpha,
    separation_from_name,
)
from uhop_jax.separation.entmax import fastest_entmax

VALUES = ("keys", "direct")
MAX_STEPS = 64  # cap on the updates of a state that has not converged
Initializer = Callable[..., Array]


class Hopfield(nnx.Module):
    """Association of states with stored patterns (Ramsauer et al. 2020; [sec:DL]).

    Args:
      state_size: dimension of states.
      memory_size: dimension of memories; `state_size` by default.
      value_size: dimension of separate values; `memory_size` by default. Needs
        `values="direct"` or `static`.
      num_heads: number of heads.
      head_size: dimension of a head's queries and keys; `state_size / num_heads` by
        default.
      value_head_size: dimension of a head's values; `head_size` by default.
      out_size: dimension of the output; `state_size` by default. Needs `project_out`.
      separation: a `Separation` or its name. An `Entmax` may have an `alpha` of shape
        `(num_heads,)`.
      learn_alpha: learn the `alpha` of an `Entmax` within (1, 2), in the shape given.
      beta: inverse temperature, a number or `(num_heads,)`; None is
        `1 / sqrt(head_size)`.
      learn_beta: learn `beta`, in the shape given.
      steps: number of updates of the state; None repeats the update until the state
        converges, at most `max_steps` times, with implicit gradients.
      max_steps: cap on the updates, 64 by default; needs `steps=None`.
      kernel: `Phi`, applied to states and memories before the projections. True is
        `LinearFeatures`; else a module, or a function that makes one, so that each
        layer has its own. Every `nnx.Param` in it becomes a `KernelParam`.
      separate_states: take the separation loss of the kernel over states and memories
        together, not over the memories alone; needs a kernel.
      values: `keys` reads out `W_V W_K Y`, as in the paper; `direct` reads out `W_V Y`.
      static: one head without projections, as in the functional core. The options of
        the projections are then errors.
      project_out: apply the output projection.
      use_bias: biases in the projections.
      weight_init: initializer of the projections' weights; LeCun normal by default.
      bias_init: initializer of the projections' biases; zeros by default.
      normalize_state: LayerNorm of the incoming states.
      normalize_memory: LayerNorm of the incoming memories.
      normalize_value: LayerNorm of direct values.
      normalize_pattern: LayerNorm of projected queries and keys, head by head.
      bias_pattern: add one learned memory.
      zero_memory: add one memory of zeros, which attracts states that match no other
        memory.
      dropout: share of the weights that is dropped when a call has a key, in `[0, 1)`.
      dtype: of the computation; None follows inputs and parameters.
      param_dtype: of the parameters.
      rngs: for the start values.

    Raises:
      ValueError: if options do not fit together, or an option would have no effect.
    """

    def __init__(
        self,
        state_size: int,
        memory_size: int | None = None,
        *,
        value_size: int | None = None,
        num_heads: int = 1,
        head_size: int | None = None,
        value_head_size: int | None = None,
        out_size: int | None = None,
        separation: Separation | str = "softmax",
        learn_alpha: bool = False,
        beta: ArrayLike | Sequence[float] | None = None,
        learn_beta: bool = False,
        steps: int | None = 1,
        max_steps: int | None = None,
        kernel: bool | nnx.Module | Callable[[], nnx.Module] = False,
        separate_states: bool = False,
        values: str = "keys",
        static: bool = False,
        project_out: bool = True,
        use_bias: bool = True,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        normalize_state: bool = False,
        normalize_memory: bool = False,
        normalize_value: bool = False,
        normalize_pattern: bool = False,
        bias_pattern: bool = False,
        zero_memory: bool = False,
        dropout: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_count("state_size", state_size, 1)
        check_count("num_heads", num_heads, 1)
        check_sizes(
            memory_size=memory_size,
            value_size=value_size,
            head_size=head_size,
            value_head_size=value_head_size,
            out_size=out_size,
            steps=steps,
            max_steps=max_steps,
        )
        check_choice("values", values, VALUES)
        check_rate("dropout", dropout)
        check_floating("param_dtype", param_dtype)
        if dtype is not None:
            check_floating("dtype", dtype)
        check_rngs(rngs)
        for name, init in (("weight_init", weight_init), ("bias_init", bias_init)):
            if init is not None and not callable(init):
                raise ValueError(
                    f"{name} must be an initializer of jax.nn.initializers, got "
                    f"{init!r}"
                )
        direct = static or values == "direct"
        for option, unused, needed in (
            ("head_size", static and head_size is not None, "static=False"),
            ("value_head_size", static and value_head_size is not None, "static=False"),
            ("out_size", static and out_size is not None, "static=False"),
            ("project_out=False", static and not project_out, "static=False"),
            ("use_bias=False", static and not use_bias, "static=False"),
            ("weight_init", static and weight_init is not None, "static=False"),
            ("bias_init", static and bias_init is not None, "static=False"),
            ("bias_init", not use_bias and bias_init is not None, "use_bias=True"),
            ("max_steps", steps is not None and max_steps is not None, "steps=None"),
            ("out_size", not project_out and out_size is not None, "project_out=True"),
            ("value_size", not direct and value_size is not None, "values='direct'"),
            ("normalize_value", not direct and normalize_value, "values='direct'"),
            ("separate_states", separate_states and kernel is False, "a kernel"),
        ):
            if unused:
                raise ValueError(f"{option} needs {needed}: else it would do nothing")
        memory_size = state_size if memory_size is None else memory_size
        value_size = memory_size if value_size is None else value_size
        if static and num_heads != 1:
            raise ValueError(f"a static layer has one head, got num_heads {num_heads}")
        if static and memory_size != state_size:
            raise ValueError(
                "a static layer compares states with memories as they are, got "
                f"state_size {state_size} and memory_size {memory_size}"
            )
        if kernel is not False and memory_size != state_size:
            raise ValueError(
                "one kernel maps states and memories, so they need one dimension, got "
                f"state_size {state_size} and memory_size {memory_size}"
            )
        if head_size is None:
            head_size = state_size // num_heads
            if not static and head_size * num_heads != state_size:
                raise ValueError(
                    f"num_heads {num_heads} must divide state_size {state_size}, or "
                    "head_size be given"
                )
        value_head_size = head_size if value_head_size is None else value_head_size

        self.num_heads, self.static, self.values = num_heads, static, values
        self.steps = steps
        self.max_steps = MAX_STEPS if max_steps is None else max_steps
        self.zero_memory, self.separate_states = zero_memory, separate_states
        self.sizes = (state_size, memory_size, value_size)
        self.names = ("state", "memories", "values")  # in errors

        if isinstance(separation, str):
            separation = separation_from_name(separation)
        if not isinstance(separation, Separation):
            raise ValueError(
                f"separation must be a Separation or its name, got {separation!r}"
            )
        separation.check()
        if learn_alpha and not isinstance(separation, Entmax):
            raise ValueError(
                f"learn_alpha needs an Entmax separation, got {separation!r}"
            )
        if isinstance(separation, Entmax):
            alpha = self._per_head("alpha", separation.alpha)
            raw = _unbounded(alpha).astype(param_dtype) if learn_alpha else None
            self.alpha = _static(alpha) if raw is None else nnx.Param(raw)
            separation = Entmax(cases=False)
            if not learn_alpha and not isinstance(fastest_entmax(alpha), Entmax):
                self.alpha, separation = None, fastest_entmax(alpha)
        else:
            self.alpha = None
        self.separation = separation

        width = state_size if static else head_size
        beta = self._per_head("beta", width**-0.5 if beta is None else beta)
        check_positive("beta", beta)
        self.beta = _static(beta)
        self.log_beta = nnx.data(None)
        if learn_beta:
            self.log_beta = nnx.Param(jnp.log(jnp.asarray(beta, param_dtype)))

        def norm(enabled: bool, size: int) -> Any:
            if not enabled:
                return nnx.data(None)
            return nnx.LayerNorm(size, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.norm_state = norm(normalize_state, state_size)
        self.norm_memory = norm(normalize_memory, memory_size)
        self.norm_value = norm(normalize_value, value_size)

        if kernel is True:
            kernel = LinearFeatures(
                state_size, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )
        if kernel is False:
            self.kernel = nnx.data(None)
            features = state_size, memory_size
        else:
            self.kernel = as_kernel(kernel)
            shape = jax.eval_shape(
                self.kernel, jax.ShapeDtypeStruct((2, state_size), param_dtype)
            ).shape
            if len(shape) != 2:
                raise ValueError(
                    f"kernel must map (n, {state_size}) to (n, D), got {shape}"
                )
            features = shape[1], shape[1]
            if values == "keys" and not static and shape[1] != memory_size:
                raise ValueError(
                    "values='keys' needs a kernel that keeps the dimension, since W_K "
                    f"acts on memories too: it maps {memory_size} to {shape[1]}; use "
                    "values='direct'"
                )

        compared = features[0] if static else head_size
        self.norm_query = norm(normalize_pattern, compared)
        self.norm_key = norm(normalize_pattern, compared)

        if not static:
            if weight_init is None:
                weight_init = nnx.initializers.lecun_normal()
            if bias_init is None:
                bias_init = nnx.initializers.zeros

            def project(size, out, axis=-1):
                return nnx.LinearGeneral(
                    size,
                    out,
                    axis=axis,
                    use_bias=use_bias,
                    kernel_init=weight_init,
                    bias_init=bias_init,
                    dtype=dtype,
                    param_dtype=param_dtype,
                    rngs=rngs,
                )

            keys_shape = (num_heads, head_size)
            values_shape = (num_heads, value_head_size)
            self.query = project(features[0], keys_shape)
            self.key = project(features[1], keys_shape)
            if values == "keys":
                self.value = project(keys_shape, values_shape, (-2, -1))
            else:
                self.value = project(value_size, values_shape)
            self.out = nnx.data(None)
            if project_out:
                out_size = state_size if out_size is None else out_size
                self.out = project(values_shape, out_size, (-2, -1))
        elif kernel is not False:
            width = features[1]

        self.bias_key = self.bias_value = nnx.data(None)
        if bias_pattern:
            init = nnx.initializers.normal(0.02)
            read = value_size if static else value_head_size
            self.bias_key = nnx.Param(
                init(rngs.params(), (num_heads, width), param_dtype)
            )
            self.bias_value = nnx.Param(
                init(rngs.params(), (num_heads, read), param_dtype)
            )
        self.dropout = float(dropout)

    def __call__(
        self,
        state: Float[Array, "*states L state_size"],
        memories: Float[Array, "..."] | None = None,
        values: Float[Array, "..."] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        association_mask: Bool[Array, "..."] | None = None,
        key: Array | None = None,
    ) -> Float[Array, "*batch L out"]:
        """Retrieves the average of the associated memories for each state.

        Args:
          state: queries `(*batch, L, state_size)`. Leading axes of the batch may be
            missing: memory sets along them share the states.
          memories: `(*batch, S, memory_size)`, or `(S, memory_size)`, which all states
            share; the states themselves by default.
          values: `(..., S, value_size)`, read out in place of the memories; only with
            `values="direct"` or `static`.
          mask: `(S,)` or `(*batch, S)`, true for valid memories. A state without any
            valid memory retrieves zero, before the output projection.
          association_mask: `(L, S)`, `(*batch, L, S)` or `(*batch, heads, L, S)` with 1
            or all heads: true where a state may see a memory. A memory that no state
            may see, by either mask, affects no result and no gradient, even if it is
            NaN.
          key: key of `jax.random` for dropout; None switches dropout off.

        Returns:
          `(*batch, L, out_size)`. Without the output projection the last axis has
          `num_heads * value_head_size` entries, and `value_size` in a static layer.

        Raises:
          ValueError: if shapes do not fit, a mask is not boolean, or `key` is not a key
            of `jax.random`.
        """
        return self._associate(
            state, memories, values, mask, association_mask, key, False
        ).output

    def associate(
        self,
        state: Float[Array, "*states L state_size"],
        memories: Float[Array, "..."] | None = None,
        values: Float[Array, "..."] | None = None,
        *,
        mask: Bool[Array, "..."] | None = None,
        association_mask: Bool[Array, "..."] | None = None,
        key: Array | None = None,
    ) -> Association:
        """As `__call__`, with weights, energies and convergence beside the output."""
        return self._associate(
            state, memories, values, mask, association_mask, key, True
        )

    def _associate(
        self, state, memories, values, mask, association_mask, key, details
    ) -> Association:
        """The association; `details` asks for the energies too."""
        name_s, name_m, name_v = self.names
        if key is not None:
            check_key(key)
        state = jnp.asarray(state)
        memories = state if memories is None else jnp.asarray(memories)
        values = None if values is None else jnp.asarray(values)
        if state.ndim < 2 or state.shape[-1] != self.sizes[0]:
            raise ValueError(
                f"{name_s} must have shape (..., L, {self.sizes[0]}), got {state.shape}"
            )
        if (
            0 in memories.shape[-2:-1]
            and self.bias_key is None
            and not self.zero_memory
        ):
            raise ValueError(
                f"{name_m} must hold at least one pattern, got shape {memories.shape}; "
                "mask the patterns of an empty bag"
            )
        single = all(number == 1 for number in memories.shape[:-2])
        if single and state.ndim >= memories.ndim:  # one memory set for all states
            memories = memories.reshape(memories.shape[-2:])
            if values is not None:
                values = values.reshape(values.shape[-2:])
        shared = memories.ndim == 2
        if memories.ndim < 2 or memories.shape[-1] != self.sizes[1]:
            raise ValueError(
                f"{name_m} must have shape (..., S, {self.sizes[1]}), got "
                f"{memories.shape}"
            )
        batch = state.shape[:-2] if shared else memories.shape[:-2]
        if batch[len(batch) - len(state.shape[:-2]) :] != state.shape[:-2]:
            raise ValueError(
                f"{name_m} have shape {memories.shape}, {name_s} {state.shape}: "
                f"leading axes must agree, or {name_m} have none, or {name_s} fewer"
            )
        if values is not None:
            if self.values == "keys" and not self.static:
                raise ValueError(f"{name_v} need a layer with values='direct'")
            if values.shape != (*memories.shape[:-1], self.sizes[2]):
                raise ValueError(
                    f"{name_v} must have shape "
                    f"{(*memories.shape[:-1], self.sizes[2])}, got {values.shape}"
                )

        shape = (*batch, self.num_heads, state.shape[-2], memories.shape[-2])
        where, visible = combined_mask(mask, association_mask, shape), None
        if where is not None:  # a memory that no state may see may be NaN
            visible = where.any((-3, -2))
            needed = visible.any(tuple(range(len(batch)))) if shared else visible
            memories = _zero_unless(needed, memories)
            if values is not None:
                values = _zero_unless(needed, values)
        if self.norm_state is not None:
            state = self.norm_state(state)
        if self.norm_memory is not None:
            memories = self.norm_memory(memories)
        read = memories if values is None else values
        if self.norm_value is not None:
            read = self.norm_value(read)
        mapped = memories
        if self.kernel is not None:
            record = getattr(self, "separation_record", None)
            if record is not None:  # set by `separation_losses`
                self._record(record, state, memories, visible, batch)
            state, mapped = self.kernel(state), self.kernel(memories)

        late = False  # whether the value projection follows the weighted sum
        if self.static:
            query, keys, read = (x[..., None, :] for x in (state, mapped, read))
        else:
            query, keys = self.query(state), self.key(mapped)
            if self.values == "keys":
                raw = keys if self.kernel is None else self.key(memories)
                fewer = math.prod(batch) * state.shape[-2] < math.prod(raw.shape[:-2])
                added = self.bias_value is not None or self.zero_memory
                late = fewer and self.num_heads == 1 and not added
                read = raw if late else self.value(raw)
            else:
                read = self.value(read)
        if self.norm_query is not None:
            query, keys = self.norm_query(query), self.norm_key(keys)
        query = jnp.broadcast_to(query, (*batch, *query.shape[-3:]))
        stored = keys.shape[-3]
        keys = self._extended(keys, self.bias_key)
        read = self._extended(read, self.bias_value)
        if where is not None:
            where = extended_mask(where, keys.shape[-3] - stored)

        # Heads are one axis before the last, (..., L, heads, size).
        arguments = query, keys, read, self._beta(), self._alpha(), where
        result = self._over_heads(details, *arguments)
        output, weights = result.output, result.weights
        if key is not None and self.dropout:
            weights = dropped(weights, self.dropout, key)
            if where is not None:  # a weight of zero times NaN is not zero
                read = _zero_unless(jnp.isfinite(read).all(-1), read)
            output = jnp.einsum("...hls,...shv->...lhv", weights, read)
        if late:
            output = self._projected(output, weights)
        if self.static:
            return map_head_axis(result._replace(output=output), jnp.squeeze)
        if self.out is None:
            output = output.reshape(*output.shape[:-2], -1)
        else:
            output = self.out(output)
        return result._replace(output=output)

    def _projected(self, mean: Array, weights: Array) -> Array:
        """The weighted sum of projected values, from the weighted sum of the memories.

        The two differ in the bias alone, which the sum of the weights scales.
        """
        output = self.value(mean)
        if self.value.bias is None:
            return output
        excess = (weights.sum(-1) - 1).astype(output.dtype)
        bias = self.value.bias[...].astype(output.dtype)
        return output + jnp.einsum("...hl,hv->...lhv", excess, bias)

    def _record(self, record, state, memories, where, batch) -> None:
        """Adds the separation loss of this call to the record."""
        patterns = memories
        if self.separate_states:
            state = jnp.broadcast_to(state, (*batch, *state.shape[-2:]))
            memories = jnp.broadcast_to(memories, (*batch, *memories.shape[-2:]))
            patterns = jnp.concatenate([state, memories], axis=-2)
            if where is not None:
                where = jnp.concatenate([jnp.ones(state.shape[:-1], bool), where], -1)
        elif where is not None and memories.ndim == 2:
            where = where.any(tuple(range(len(batch))))
        self.separation_record = record.extended(self.kernel, patterns, where)

    def _over_heads(
        self, details, query, keys, read, beta, alpha, where
    ) -> Association:
        """Retrieval of each head; arrays have an axis of heads before and after."""

        def one_head(query, keys, read, beta, alpha, where) -> Association:
            separation: Any = self.separation
            if isinstance(separation, Entmax):
                separation = dataclasses.replace(separation, alpha=alpha)
            model = Model(separation=separation, beta=beta)
            if self.steps is None:
                end = converge(
                    model,
                    keys,
                    query,
                    values=read,
                    mask=where,
                    max_steps=self.max_steps,
                )
                return Association(
                    end.pattern,
                    end.weights,
                    end.energy,
                    end.steps,
                    end.converged,
                )
            state, weights = retrieve(
                model, keys, query, values=read, mask=where, steps=self.steps
            )
            energies = None
            if details and model.has_energy:
                last = retrieve(model, keys, query, mask=where, steps=self.steps).state
                energies = energy(model, keys, last, mask=where)
            steps = jnp.full(weights.shape[:-1], self.steps, jnp.int32)
            return Association(state, weights, energies, steps, None)

        arguments = (query, keys, read, beta, alpha, where)
        per_head = None if where is None or where.shape[-3] == 1 else -3
        if where is not None and per_head is None:
            arguments = (*arguments[:-1], where.squeeze(-3))
        axes = (-2, -2, -2, *map(_head_axis, (beta, alpha)), per_head)
        if self.num_heads > 1:
            return jax.vmap(one_head, axes, HEAD_AXES)(*arguments)
        single = [
            x if axis is None else x.squeeze(axis)
            for x, axis in zip(arguments, axes, strict=True)
        ]
        return map_head_axis(one_head(*single), jnp.expand_dims)

    def _beta(self) -> Array:
        """The inverse temperature: one for all heads, or one for each."""
        if self.log_beta is None:
            return jnp.asarray(self.beta)
        return jnp.exp(self.log_beta[...])

    def _alpha(self) -> Array | None:
        """`alpha`: one for all heads, or one for each; None without an entmax."""
        if self.alpha is None:
            return None
        if isinstance(self.alpha, nnx.Variable):
            return bounded_alpha(self.alpha[...])
        return jnp.asarray(self.alpha)

    def _per_head(self, name: str, value: Any) -> np.ndarray:
        """A number, or `(num_heads,)` numbers, of a checked shape."""
        value = as_numbers(name, value)
        if value.shape not in ((), (self.num_heads,)):
            raise ValueError(
                f"{name} must be a number or have shape ({self.num_heads},), one for "
                f"each head, got {value.shape}"
            )
        return value

    def _extended(self, x: Array, bias: nnx.Variable | None) -> Array:
        """`x (..., S, heads, size)` with the bias pattern and the zero memory added."""
        added = []
        if bias is not None:
            added.append(bias[...].astype(x.dtype))
        if self.zero_memory:
            added.append(jnp.zeros(x.shape[-2:], x.dtype))
        shape = (*x.shape[:-3], 1, *x.shape[-2:])
        added = [jnp.broadcast_to(pattern, shape) for pattern in added]
        return jnp.concatenate([x, *added], axis=-3) if added else x


def _zero_unless(valid: Array, x: Array) -> Array:
    """`x (..., size)` with the rows that are not `valid (...)` zero."""
    return jnp.where(valid[..., None], x, jnp.zeros((), x.dtype))


def _head_axis(x: Array | None) -> int | None:
    """The axis of heads of `beta` or `alpha`; None if it is one number."""
    return 0 if x is not None and x.ndim else None


def _unbounded(alpha: np.ndarray) -> Array:
    """The raw parameter that `bounded_alpha` maps to `alpha`."""
    if not ((alpha > 1) & (alpha < 2)).all():
        raise ValueError(f"a learned alpha must start within (1, 2), got {alpha}")
    return jnp.asarray(np.log((alpha - 1) / (2 - alpha)))


def _static(x: np.ndarray) -> Any:
    """Numbers in place of an array: static data of a module must be hashable."""
    return tuple(x.tolist()) if x.ndim else float(x)
