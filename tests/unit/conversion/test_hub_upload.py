"""Upload of an export: what is sent, and what a user reads when it fails. The Hub is a stub in this process."""

import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

from tests.conftest import write_folder
from xlpre.conversion import hub_upload
from xlpre.conversion.hub_upload import upload


class FakeHub:
    """Hub with some files in its repository, which records uploads."""

    def __init__(self, *files, error=None):
        self.files, self.error, self.calls = set(files), error, []

    def create_repo(self, repo_id, **settings):
        self.calls.append(("create", repo_id, settings))
        return f"https://huggingface.co/{repo_id}"

    def file_exists(self, repo_id, filename):
        return filename in self.files

    def upload_folder(self, *, repo_id, folder_path, ignore_patterns, **_):
        if self.error:
            raise self.error
        files = {path.name for path in folder_path.iterdir()} - set(ignore_patterns or ())
        self.calls.append(("upload", repo_id, files))


@pytest.fixture
def export(tmp_path):
    (tmp_path / "export").mkdir()
    for name in ("README.md", "config.json"):
        (tmp_path / "export" / name).write_text("{}")
    return tmp_path / "export"


def use(monkeypatch, hub):
    monkeypatch.setattr(hub_upload, "HfApi", lambda: hub)
    return hub


def test_a_new_repository_is_private_and_gets_all_files(export, monkeypatch):
    hub = use(monkeypatch, FakeHub())
    assert "kept" not in upload(export, "me/mine")
    assert hub.calls == [
        ("create", "me/mine", {"private": True, "exist_ok": True}),
        ("upload", "me/mine", {"README.md", "config.json"}),
    ]


def test_a_card_on_the_hub_is_kept_and_the_user_reads_how_to_replace_it(export, monkeypatch):
    hub = use(monkeypatch, FakeHub("README.md"))
    assert f"`hf upload me/mine {export}/README.md README.md`" in upload(export, "me/mine")
    assert hub.calls[-1] == ("upload", "me/mine", {"config.json"})


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (LocalTokenNotFoundError("no token"), "you are not logged in .* Run `hf auth login`"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE .* Unset it"),
        (ConnectionResetError("reset by peer"), r"cannot be reached \(reset by peer\). Check the network"),
    ],
)
def test_a_failed_upload_names_the_remedy_and_the_command_that_repeats_it(error, remedy, export, monkeypatch):
    use(monkeypatch, FakeHub("README.md", error=error))
    repeat = f"Upload it with `hf upload me/mine {export} . --private --exclude README.md`"
    with pytest.raises(ValueError, match=rf"^--push me/mine failed: .*{remedy}\. .*{repeat}\.$"):
        upload(export, "me/mine")


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "Run `hf auth login`"),
        (403, "a token that may"),
        (400, r"status 400 \(Name is reserved\). Correct that"),
    ],
)
def test_an_answer_of_the_hub_is_explained(status, remedy, export, monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("X-Error-Message", "Name is reserved")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self):
            self.do_POST()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)  # other tests forbid the network
    address = f"http://127.0.0.1:{server.server_port}"
    api = partial(huggingface_hub.HfApi, endpoint=address, token="hf_stub")
    monkeypatch.setattr(hub_upload, "HfApi", api)
    try:
        with pytest.raises(
            ValueError, match=f"failed: .*{remedy}.*--exclude README.md` if the repository already has a model card"
        ):
            upload(export, "me/mine")
    finally:
        server.shutdown()
        server.server_close()


def test_a_hub_that_does_not_answer_is_explained(export, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        hub_upload, "HfApi", partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9", token="hf_stub")
    )
    with pytest.raises(ValueError, match="cannot be reached .* Check the network"):
        upload(export, "me/mine")


def test_the_command_exports_before_it_uploads_and_keeps_the_export_of_a_failed_upload(
    tokenizer, tmp_path, monkeypatch, capsys
):
    from pretrain.export import main

    source, target = write_folder(tmp_path / "source", tokenizer), tmp_path / "exported"
    use(monkeypatch, FakeHub(error=ConnectionResetError("reset by peer")))
    with pytest.raises(ValueError, match="cannot be reached"):
        main([str(source), str(target), "--hf", "--push", "me/mine"])
    assert {"README.md", "config.json", "model.safetensors"} <= {path.name for path in target.iterdir()}
    assert '"me/mine"' in (target / "README.md").read_text()
    for invalid in ("mine", "me/", "me/mi ne", "a/b/c"):
        with pytest.raises(ValueError, match=f"^--push={invalid} is invalid: .* Write OWNER/NAME"):
            main([str(source), str(tmp_path / "other"), "--push", invalid])
    assert not (tmp_path / "other").exists()
    hub = use(monkeypatch, FakeHub())
    main([str(source), str(tmp_path / "native"), "--push", "me/mine"])
    assert hub.calls[-1][2] >= {"README.md", "spiece.model"} and "uploaded to" in capsys.readouterr().out
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "native" / "README.md").read_text(), re.DOTALL)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name: tmp_path / "native" if name == "me/mine" else ""
    )
    names: dict = {}
    exec(code, names)
    assert len(names["predictions"]) == 5
