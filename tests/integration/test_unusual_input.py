"""Input that is unusual but valid: paths with spaces and Unicode, and a text that is shorter than the rows of a batch."""

from tests.conftest import make_documents
from tests.integration.conftest import call, run, tiny_args
from xlpre.conversion.model_folder import load_folder
from xlpre.data.store import TokenStore
from xlpre.data.store_builder import write_store
from xlpre.training.metrics_writer import read_metrics

SCRIPT = "pretrain/run.py"


def test_paths_may_have_spaces_and_unicode_characters(tmp_path, text_file):
    folder = tmp_path / "zwei Wörter, 三 – 😀"
    folder.mkdir()
    (folder / "mein Text.txt").write_bytes(text_file.read_bytes())
    vocabulary, store = folder / "ein Vokabular.model", folder / "ein Store"
    paths = [f"tokenizer.path={vocabulary}", f"data.store_dir={store}", f"text.source={folder}/* Text.txt"]
    for script in ("pretrain/train_tokenizer.py", "pretrain/prepare.py"):
        done = call(script, *paths, "tokenizer.vocab_size=300", "text.val_fraction=0.1")
        assert done.returncode == 0, done.stderr
    args = tiny_args(TokenStore(store), folder, "ein Lauf", tokenizer__path=vocabulary, schedule__decay="constant")
    for steps in (1, 2):  # the second resumes
        done = run(SCRIPT, *args, f"train.steps={steps}")
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes from" in done.stdout
    for kind in ("hf", "tf"):
        done = call("pretrain/export.py", folder / "ein Lauf", folder / f"als {kind}", f"--{kind}")
        assert done.returncode == 0 and load_folder(folder / f"als {kind}").weights, done.stderr
    done = call("pretrain/report.py", folder / "ein Lauf")
    assert done.returncode == 0 and (folder / "ein Lauf" / "report.html").exists(), done.stderr


def test_a_text_shorter_than_the_rows_of_a_batch_is_read_again(tokenizer, tmp_path):
    store = write_store(tmp_path / "store", make_documents(24), tokenizer, 0.3, {"source": "docstrings"}, {})
    n_rows = len(store.train) // 32 + 2
    n_rows += n_rows % 2
    done = run(SCRIPT, *tiny_args(store, tmp_path, train__steps=3, train__global_batch_size=n_rows))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line["loss"] > 0 for line in read_metrics(tmp_path / "tiny") if "loss" in line)
