"""`epk-gp record --keep-every`: a run with fewer weight states is opened, verified and resumed."""

from commands import SMALL, refused, run
from epk_gp.storage.schema import read_header


def test_a_run_is_recorded_with_fewer_states(tmp_path, capsys):
    folder, steps = tmp_path / "run", ("--batch-size", 7, "--optimizer", "adam", "--lr", 0.01, *SMALL)
    assert run("record", "--out", folder, "--keep-every", 3, *steps) == 0
    assert read_header(folder)["keep_every"] == 3
    assert run("verify", folder, "--quiet", "--num-points", 1) == 0
    assert run("info", folder, "--quiet") == 0
    assert "one in 3 is kept" in capsys.readouterr().out
    assert run("record", "--resume", "--out", folder, "--steps", 7, "--quiet") == 0  # as it was recorded
    capsys.readouterr()
    assert "must hold every state" in refused(capsys, "export", folder, "--quiet", "--out", tmp_path / "x.safetensors")
