"""`pretrain/generate.py`: texts as from Python, streamed, from several sources."""

import dataclasses
import io

import pytest
import torch

from pretrain import generate as command
from tests.conftest import TINY, write_folder
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.inference import GenerationConfig, generate
from xlpre.model.language_model import LanguageModel


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("generate") / "model", tokenizer)


def expected_texts(model, prompt, **settings):
    folder = load_folder(model)
    config = GenerationConfig(max_new_tokens=12, **settings)
    return [prompt + c.text for c in generate(folder.model(), folder.tokenizer, [prompt], config)]


def run(model, *arguments, capsys):
    command.main([str(model), *arguments, "--max-new-tokens", "12"])
    return capsys.readouterr().out


def test_the_text_is_that_from_python(model, capsys):
    assert run(model, "Ba di.", capsys=capsys) == expected_texts(model, "Ba di.")[0] + "\n"
    greedy = run(model, "Ba di.", "--temperature", "0", "--free-len", "4", "--mem-len", "6", capsys=capsys)
    assert greedy == expected_texts(model, "Ba di.", temperature=0, free_len=4, mem_len=6)[0] + "\n"
    assert run(model, capsys=capsys) == expected_texts(model, "")[0] + "\n"


@pytest.mark.parametrize("name, value", [("top_k", 3), ("top_p", 0.2), ("repetition_penalty", 1.5)])
def test_options_of_sampling_are_those_of_python_and_change_the_text(model, capsys, name, value):
    text = run(model, "Ba di.", f"--{name.replace('_', '-')}", str(value), capsys=capsys)
    assert text == expected_texts(model, "Ba di.", **{name: value})[0] + "\n" != run(model, "Ba di.", capsys=capsys)


def test_a_choice_among_one_token_is_greedy(model, capsys):
    greedy = run(model, "Ba di.", "--temperature", "0", capsys=capsys)
    assert run(model, "Ba di.", "--top-k", "1", capsys=capsys) == greedy


def test_text_is_printed_as_it_is_generated(model, monkeypatch):
    parts = []
    monkeypatch.setattr(command, "print", lambda *texts, **_: parts.append("".join(texts)), raising=False)
    command.main([str(model), "Ba di.", "--max-new-tokens", "12"])
    assert len(parts) > 3 and "".join(parts) == expected_texts(model, "Ba di.")[0]


def test_several_samples_are_numbered(model, capsys):
    first, second = expected_texts(model, "Ba di.", num_samples=2, seed=5)
    out = run(model, "Ba di.", "--num-samples", "2", "--seed", "5", capsys=capsys)
    assert out == f"--- 1 of 2\n{first}\n--- 2 of 2\n{second}\n"


def test_a_prompt_is_read_from_standard_input_and_a_stop_string_is_left_out(model, capsys, monkeypatch):
    full = expected_texts(model, "Ba di.\nKe")[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("Ba di.\nKe\n"))
    stop = full[len("Ba di.\nKe") + 5 :][:3]
    out = run(model, "-", "--stop", stop, "--stop", "never", capsys=capsys)
    assert out == "Ba di.\nKe" + full[len("Ba di.\nKe") :].partition(stop)[0] + "\n"


def test_a_prompt_in_another_encoding_is_refused(model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("gr\xf6\xdfe".encode("latin-1")), "utf-8"))
    with pytest.raises(ValueError, match=r"^PROMPT=- is invalid: standard input is not utf-8"):
        command.main([str(model), "-"])


def test_a_denoising_model_is_refused(tokenizer, tmp_path):
    shape = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    weights = {name: p.detach() for name, p in LanguageModel(shape, False).named_parameters()}
    save_folder(tmp_path / "model", ModelFolder(shape, weights, tokenizer, "denoising", {}, "xlpre"))
    with pytest.raises(ValueError, match=r"^a denoising model cannot continue a text.* Fill blanks"):
        command.main([str(tmp_path / "model"), "Ba di."])
    assert torch.is_grad_enabled()
