"""The README's own code runs as it is printed."""

import re
from pathlib import Path

import jax

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys, untyped):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    names: dict = {}
    standard = jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow")
    with jax.enable_x64(False), standard[0], standard[1]:
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
            exec(compile(block, "README.md", "exec"), names)
    assert names["retrieved"].shape == names["result"].state.shape == (100, 64)
    assert "expected error" in capsys.readouterr().out
    assert names["path"].exists()


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
