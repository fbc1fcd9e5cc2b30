import pytest

from xlpre.training.run_dir import MAX_SEED, check_run_dir_writable, check_run_identity


@pytest.mark.parametrize("name", ["", "checkpoints"])
def test_a_broken_link_is_reported_with_its_target(tmp_path, name):
    run = tmp_path / "run"
    if name:
        run.mkdir()
    (run / name).symlink_to("/nowhere/far")
    with pytest.raises(ValueError, match=f"run_dir={run} is invalid: {run / name} is a link to /nowhere/far"):
        check_run_dir_writable(str(run), "checkpoints")


def test_a_file_in_place_of_the_checkpoints_folder_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="checkpoints is not a folder. Set another run_dir"):
        check_run_dir_writable(str(tmp_path), "checkpoints")


@pytest.mark.parametrize(
    ("name", "run_dir", "seed", "num_seeds", "key"),
    [
        ("a/b", "runs/a", 1, 1, "name='a/b'"),
        ("..", "runs/a", 1, 1, "name='..'"),
        ("a", "", 1, 1, "run_dir=''"),
        ("a", "runs/a", -1, 1, "seed=-1"),
        ("a", "runs/a", 1, 0, "num_seeds=0"),
        ("a", "runs/a", MAX_SEED, 2, f"seed={MAX_SEED + 1}"),
    ],
)
def test_an_invalid_name_folder_or_seed_is_refused(name, run_dir, seed, num_seeds, key):
    with pytest.raises(ValueError, match=f"{key} is invalid"):
        check_run_identity(name, run_dir, seed, num_seeds)
