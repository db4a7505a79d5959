"""Memories split over several devices, for the same functions as on one device.

For retrieval the rows are split: `retrieve` sums over the devices and never gathers the
memories. For Stage I, which compares all pairs of memories, the components are split:
every Gram matrix is a sum over the devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from uhop_jax._checks import check_choice, check_count, holdable, native

AXIS = "memories"


class Sharded(NamedTuple):
    """Result of `shard_memories`.

    Attributes:
      memories: `(M, d)`, padded with zero rows to a multiple of the number of devices.
      mask: `(M,)`, true for memories, false for padding; None without padding. Pass it
        to `retrieve`.
    """

    memories: Float[Array, "M d"]
    mask: Bool[Array, " M"] | None


def memory_mesh(shards: int | None = None) -> Mesh:
    """A mesh with one axis, named `memories`, over the devices of all processes.

    Args:
      shards: number of devices; None is all devices.

    Raises:
      ValueError: if `shards` exceeds the number of devices.
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

    In a run of several processes every process calls it with the same memories. If the
    memories are a memory-mapped file, each process reads its own rows only.

    Args:
      memories: stored patterns, one per row. Split the values of a hetero-association
        by the same call.
      mesh: a mesh with one axis of type `AxisType.Auto`, as from `memory_mesh`.
      over: `memories` splits the rows, for retrieval; `components` splits the columns,
        for Stage I, and the columns of the kernel that it learns.

    Returns:
      `Sharded`.

    Raises:
      ValueError: if the mesh does not fit, `memories` are no array `(M, d)`, or
        components are split and `d` is no multiple of the number of devices.
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
    """The array `shape` split over devices; rows that `x` lacks are zero."""
    dtype = jnp.asarray(holdable(np.zeros((), x.dtype))).dtype

    def part(index: Any) -> np.ndarray:
        local = np.asarray(x[index])
        rows = len(range(*index[0].indices(shape[0])))
        padding = ((0, rows - len(local)), *(((0, 0),) * (local.ndim - 1)))
        return np.pad(local, padding).astype(dtype)

    return jax.make_array_from_callback(shape, split, part)
