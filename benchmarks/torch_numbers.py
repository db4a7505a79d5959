"""Outputs of PyTorch's layers, to which `tests/test_torch_weights.py` compares ours.

    PYTHONPATH=DIR python benchmarks/torch_numbers.py [--out tests/torch_numbers.json]

DIR holds the package `hflayers` of github.com/ml-jku/hopfield-layers, which is not on
PyPI. The file has, for each case, the names and shapes of the state dict and the
output; `drawn` draws the entries and the inputs of every case, here and in the test.
Printed besides: what `docs/how_to/hopfield_layers.md` says that its code does.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

B, L, S = 2, 3, 5
PLAIN = {"normalize_stored_pattern": False, "normalize_stored_pattern_affine": False}
PLAIN |= {"normalize_state_pattern": False, "normalize_state_pattern_affine": False}
WITHOUT = {"normalize_pattern_projection": False}
WITHOUT |= {"normalize_pattern_projection_affine": False}
SIZES = {
    **{"hidden_size": 4, "num_heads": 2, "pattern_size": 3, "output_size": 5},
    **{"stored_pattern_size": 6, "pattern_projection_size": 7},
}
SPACE = {"normalize_hopfield_space": True, "normalize_hopfield_space_affine": True}
UPDATES = {"update_steps_max": 2, "scaling": 0.7, "num_heads": 2, "hidden_size": 4}
EXTRA = {"add_zero_association": True, "concat_bias_pattern": True}
ATTENTION = {"embed_dim": 8, "num_heads": 2, "batch_first": True}
OTHER_SIZES = {"kdim": 6, "vdim": 6, "add_bias_kv": True, "add_zero_attn": True}
# Module, options, sizes of states, memories and values (0: none are given).
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "self": ("Hopfield", {"input_size": 8}, (8, 0, 0)),
    "sizes": ("Hopfield", {"input_size": 8, **SIZES}, (8, 6, 7)),
    "updates": ("Hopfield", {"input_size": 8, **UPDATES, **SPACE, **EXTRA}, (8, 8, 8)),
    "converged": (
        "Hopfield",
        {"input_size": 8, "update_steps_max": None, "update_steps_eps": 1e-7},
        (8, 8, 8),
    ),
    "connected": (
        "Hopfield",
        {"input_size": 8, "pattern_projection_as_connected": True, **WITHOUT}
        | {"normalize_stored_pattern": False}
        | {"normalize_stored_pattern_affine": False},
        (8, 8, 0),
    ),
    "connected, with norms": (
        "Hopfield",
        {"input_size": 8, "pattern_projection_as_connected": True},
        (8, 8, 8),
    ),
    "bare": (
        "Hopfield",
        {"input_size": 8, **PLAIN, **WITHOUT, "input_bias": False}
        | {"disable_out_projection": True, "num_heads": 2},
        (8, 8, 8),
    ),
    "pooling": (
        "HopfieldPooling",
        {"input_size": 8, "hidden_size": 4, "num_heads": 2, "quantity": 2},
        (0, 8, 0),
    ),
    "lookup": ("HopfieldLayer", {"input_size": 8, "quantity": 4}, (8, 0, 0)),
    "lookup of values": (
        "HopfieldLayer",
        {"input_size": 8, "quantity": 4, "lookup_weights_as_separated": True}
        | {"pattern_projection_size": 6},
        (8, 0, 0),
    ),
    "attention": ("MultiheadAttention", ATTENTION, (8, 8, 8)),
    "attention of other sizes": (
        "MultiheadAttention",
        ATTENTION | OTHER_SIZES,
        (8, 6, 6),
    ),
}


def drawn(
    shapes: Mapping[str, Sequence[int]], sizes: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The state dict and the inputs of a case, and a mask, true for valid memories."""
    generator = np.random.default_rng(0)
    state = {
        name: generator.normal(0.0, 0.4, shapes[name]).astype(np.float32)
        for name in sorted(shapes)
    }
    inputs = {
        name: generator.normal(size=(B, number, size)).astype(np.float32)
        for name, number, size in zip("qkv", (L, S, S), sizes, strict=True)
        if size
    }
    if sizes[1]:
        inputs["mask"] = np.arange(S) < np.asarray([[S], [3]])
    return state, inputs


def output(name: str) -> tuple[dict[str, list[int]], np.ndarray]:
    """Shapes of the state dict of a case, and the output of its module."""
    import torch

    kind, options, sizes = CASES[name]
    source = torch.nn if kind == "MultiheadAttention" else _hopfield_layers()
    module = getattr(source, kind)(**options).eval()
    shapes = {key: list(x.shape) for key, x in module.state_dict().items()}
    state, inputs = drawn(shapes, sizes)
    module.load_state_dict({key: torch.tensor(x) for key, x in state.items()})
    given = {key: torch.tensor(x) for key, x in inputs.items()}
    padding = {}
    if "mask" in given:
        known = "key_padding_mask" if source is torch.nn else None
        padding = {known or "stored_pattern_padding_mask": ~given.pop("mask")}
    with torch.no_grad():
        if source is torch.nn:
            result = module(*given.values(), **padding)[0]
        elif kind == "Hopfield" and "k" in given:
            values = given.get("v", given["k"])
            result = module((given["k"], given["q"], values), **padding)
        else:
            result = module(*given.values(), **padding)
    return shapes, result.numpy()


def _hopfield_layers() -> Any:
    """The package of hopfield-layers; ends the program if it is missing."""
    try:
        return importlib.import_module("hflayers")
    except ImportError:
        sys.exit(
            "torch_numbers.py needs PyTorch and the package hflayers of "
            "github.com/ml-jku/hopfield-layers on PYTHONPATH"
        )


def facts() -> dict[str, str]:
    """What hopfield-layers does with some of its options, by an experiment each."""
    import torch

    module = _hopfield_layers().Hopfield
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)

    def apart(a: Any, b: Any) -> str:
        return f"apart by {float((a - b).detach().abs().max()):.1e}"

    scaled = [
        module(8, num_heads=2, scaling=scaling).eval()
        for scaling in (torch.tensor([0.5, 2.0]), 0.5)
    ]
    scaled[1].load_state_dict(scaled[0].state_dict())
    weights = [one.get_association_matrix(x)[:, 0] for one in scaled]
    biased = module(8, concat_bias_pattern=True).eval()
    before = biased(x)
    biased.association_core.bias_v.data += 100
    static: dict[str, Any] = PLAIN | WITHOUT | {"disable_out_projection": True}
    for name in ("stored_pattern", "state_pattern", "pattern_projection"):
        static[f"{name}_as_static"] = True
    heads = module(num_heads=2, **static).eval()
    changed = torch.stack([x[0], x[1] + 1])
    plain = module(8)
    plain(x).sum().backward()
    hidden = torch.ones(2, 5, dtype=torch.bool)
    blind = plain(x, stored_pattern_padding_mask=hidden)
    gradient = plain.norm_pattern_projection.weight.grad
    return {
        "weights of head 1 at scaling (0.5, 2) and at 0.5": apart(*weights),
        "outputs before and after a change of bias_v": apart(before, biased(x)),
        "outputs of set 1 after a change of set 2, static, two heads": apart(
            heads(x)[0], heads(changed)[0]
        ),
        "gradient of the norm of values in the first step": str(gradient),
        "outputs of states that see nothing": str(blind.unique().tolist()[0]),
    }


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("tests/torch_numbers.json"))
    cases = {}
    for name, (_, _, sizes) in CASES.items():
        shapes, result = output(name)
        numbers = [round(float(x), 7) for x in result.ravel()]
        cases[name] = {"shapes": shapes, "sizes": sizes, "output": numbers}
        cases[name]["shape"] = result.shape
        print(f"{name}: {result.shape}, largest {abs(result).max():.3f}")
    for fact, result in facts().items():
        print(f"{fact}: {result}")
    lines = [f"{json.dumps(name)}: {json.dumps(x)}" for name, x in cases.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    parser.parse_args().out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
