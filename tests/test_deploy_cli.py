"""onnx-fuse compile: the command."""

import json
from pathlib import Path

import pytest
from support import ENCODER, Cli
from test_deploy import H200, IDS

from onnx_fuse.errors import DeviceError
from onnx_fuse.runtime import device
from onnx_fuse.runtime.deployed import Deployed


@pytest.mark.usefixtures("no_compiler")
def test_the_command_compiles_every_shape_asked_for(cli: Cli, tmp_path: Path) -> None:
    path, report = tmp_path / "m.fused", tmp_path / "r.json"
    cli.done(
        *("compile", ENCODER, "-o", path, "--target", "h200,a100", "--json", report),
        *("--dim", "batch=1,2", "sequence=8..16:8"),
    )
    wanted = [(b, s) for b in (1, 2) for s in (8, 16)]
    assert [s["input_ids"][0] for s in Deployed(path).shapes()] == wanted
    found = json.loads(report.read_text())
    assert found["targets"] == {"h200": 4, "a100": 4}
    assert found["shapes"][1] == {name: [1, 16] for name in IDS}
    cli.done(
        *("compile", ENCODER, "-o", path, "--target", "h200"),
        *("--input-shapes", "input_ids:1,4", "--input-shapes", "input_ids:3,5"),
    )
    assert [s["token_type_ids"][0] for s in Deployed(path).shapes()] == [(1, 4), (3, 5)]
    done = cli.done(
        *("compile", ENCODER, "-o", path, "--target", "h200", "--json", report),
        *("--dim", "batch=2", "sequence=3..20"),
    )
    assert "sequence from 3 to 20" in done
    assert json.loads(report.read_text())["ranges"] == {"sequence": [3, 20]}
    for length in range(3, 21):
        assert Deployed(path).made(dict.fromkeys(IDS, ((2, length), "int64")), H200).program.calls
    # elsewhere the file is the graph that is in it
    cli.done("run", path, "--input-shapes", "input_ids:2,3")
    cli.done("validate", path, "--against", ENCODER)
    cli.done("optimize", path, "-o", tmp_path / "n.onnx", "--no-check")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "cuda"], "name the one that will run the file, as in --target h200"),
        (["--target", "h2"], "--target h2: choose cuda or one of h200"),
        (["--target", "h200"], "axis 0 is dynamic: give it by --input-shapes or by --dim batch=8"),
        (["--target", "h200", "--dim", "batch=x"], "--dim batch=x: expected SYMBOL=8"),
        (["--target", "h200", "--dim", "batch=1..9999:1"], "asks for 9,999 programs"),
        (["--target", "h200", "--dim", "none=1"], "no input has a size named 'none'"),
    ],
)
def test_the_command_says_what_is_wrong(
    cli: Cli, tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(device_id: int = 0) -> None:
        raise DeviceError("no NVIDIA driver was found")

    monkeypatch.setattr(device, "probe", none)
    done = cli("compile", ENCODER, "-o", tmp_path / "m.fused", *arguments)
    assert done.code in (1, 2)
    assert message in done.err
    assert not list(tmp_path.iterdir())
