"""Memories over many devices: placement alone, the functions stay the same.

`retrieve` on memories that are split by rows sums over the devices and never gathers
the memories; Stage I compares all pairs of them, so there it is the components that are
split, and every Gram matrix is a sum over the devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import check_choice, check_count, native

AXIS = "memories"


class Sharded(NamedTuple):
    """Result of `shard_memories`.

    Attributes:
      memories: `(M, d)`, padded with zero rows to a multiple of the devices.
      mask: `(M,)`, true for the rows that are memories; None if none was added. Pass
        it to `retrieve`.
    """

    memories: Float[Array, "M d"]
    mask: Bool[Array, " M"] | None


def memory_mesh(shards: int | None = None) -> Mesh:
    """A mesh of one axis, `memories`, over the devices of all processes.

    Args:
      shards: how many devices; None is all.

    Raises:
      ValueError: if there are fewer devices.
    """
    devices = jax.devices()
    shards = len(devices) if shards is None else shards
    check_count("shards", shards, 1)
    if shards > len(devices):
        raise ValueError(
            f"shards is {shards}, but there are {len(devices)} devices (on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shards} makes more)"
        )
    auto = (AxisType.Auto,)
    return jax.make_mesh((shards,), (AXIS,), axis_types=auto, devices=devices[:shards])


def shard_memories(
    memories: Float[Array, "M d"] | Float[np.ndarray, "M d"],
    mesh: Mesh,
    *,
    over: str = "memories",
) -> Sharded:
    """Splits memories over the devices of a mesh.

    Several processes each call it with the same memories (a file that all of them map
    will do: each reads its own rows).

    Args:
      memories: stored patterns, one per row; values are split the same way.
      mesh: one axis of type `AxisType.Auto`, as `memory_mesh` makes.
      over: `memories`, rows split, for retrieval; or `components`, columns split, for
        Stage I, whose kernel is then split likewise.

    Returns:
      `Sharded`.

    Raises:
      ValueError: if the mesh does not fit, or `d` is not a multiple of the devices
        where components are split.
    """
    check_choice("over", over, ("memories", "components"))
    if len(mesh.axis_names) != 1 or mesh.axis_types != (AxisType.Auto,):
        raise ValueError(
            "mesh must have one axis of type AxisType.Auto, as memory_mesh() makes, "
            f"got axes {mesh.axis_names} of types {mesh.axis_types}"
        )
    if not isinstance(memories, np.ndarray | jax.Array) or memories.ndim != 2:
        raise ValueError(f"memories must have shape (M, d), got {np.shape(memories)}")
    memories = native(memories)
    axis, size = mesh.axis_names[0], mesh.size
    count, d = memories.shape
    if over == "components":
        if d % size:
            raise ValueError(
                f"memories have {d} components, which {size} devices cannot share "
                "equally: append zeros, or take fewer devices"
            )
        split = NamedSharding(mesh, PartitionSpec(None, axis))
        return Sharded(_placed(memories, memories.shape, split), None)
    padded = count + -count % size
    split = NamedSharding(mesh, PartitionSpec(axis))
    placed = _placed(memories, (padded, d), split)
    if padded == count:
        return Sharded(placed, None)
    return Sharded(placed, _placed(np.arange(padded) < count, (padded,), split))


def _placed(x: Any, shape: tuple[int, ...], split: NamedSharding) -> Array:
    """Each device gets its own part alone, missing rows as zeros."""
    dtype = jnp.asarray(np.zeros((), x.dtype)).dtype

    def part(index: Any) -> np.ndarray:
        here = np.asarray(x[index])
        rows = len(range(*index[0].indices(shape[0])))
        missing = ((0, rows - len(here)), *(((0, 0),) * (here.ndim - 1)))
        return np.pad(here, missing).astype(dtype)

    return jax.make_array_from_callback(shape, split, part)
