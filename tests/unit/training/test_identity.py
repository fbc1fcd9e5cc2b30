import pytest

from xlpre.training.run_dir import check_run_dir_writable


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_link_to_a_place_that_is_gone_is_named_with_that_place(tmp_path, name):
    run = tmp_path / "run"
    if name:
        run.mkdir()
    (run / name).symlink_to("/nowhere/far")
    with pytest.raises(ValueError, match=f"{run / name} is a link to /nowhere/far, which is not there; put that back"):
        check_run_dir_writable(str(run), "checkpoints")


def test_a_file_where_checkpoints_go_is_refused_before_the_run_begins(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="checkpoints is there already and is no folder"):
        check_run_dir_writable(str(tmp_path), "checkpoints")
