"""The adapter for lm-eval: results of tasks defined in local files."""

import json

import numpy as np
import pytest
import torch

from tests.conftest import write_folder
from xlpre.batch import HIDDEN_RANK, make_batch
from xlpre.conversion.model_folder import ModelFolder, load_folder, save_folder
from xlpre.inference import GenerationConfig, generate, score
from xlpre.inference.generation import encode_prompt
from xlpre.model.language_model import LanguageModel
from xlpre.model.memory import initial_memory
from xlpre.text.special_tokens import CLS, EOD, MASK, SEP

lm_eval = pytest.importorskip(
    "lm_eval", reason='lm-eval is not installed: pip install -c constraints.txt -e ".[lm-eval]"'
)
CHOICES = ["ke lo", "mi", "ta di ba"]
ROWS = [{"context": context, "answer": i % 3} for i, context in enumerate(["Ba di", "Ke lo bu", "Mi", "Ba di", "Lo"])]
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_target": "answer",
        "doc_to_choice": CHOICES,
        "metric_list": [{"metric": "acc"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{context}}",
        "generation_kwargs": {"until": ["a"], "max_gen_toks": 7, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module", params=["causal", "permutation"])
def path(request, tokenizer, tmp_path_factory):
    path = write_folder(tmp_path_factory.mktemp("harness") / "model", tokenizer)
    if request.param == "causal":
        folder = load_folder(path)
        save_folder(path, ModelFolder(folder.config, folder.weights, tokenizer, "causal", {}, "xlpre"))
    return path


@pytest.fixture(scope="module")
def results(path, tmp_path_factory):
    """Result of the harness, with its samples."""
    from lm_eval.tasks import TaskManager

    from xlpre.lm_eval_adapter import HarnessModel

    home = tmp_path_factory.mktemp("tasks")
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(home / "rows.jsonl")}, "cache_dir": str(home / "cache")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task}
        (home / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    manager = TaskManager(include_path=str(home), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=HarnessModel(str(path), device="cpu", batch_size=2), tasks=[*TASKS], task_manager=manager
    )


@torch.no_grad()
def expected_log_likelihood(path, context, continuation):
    """Log-likelihood from a pass per token over the whole text."""
    folder = load_folder(path)
    ids = encode_prompt(folder.tokenizer, f"{context} {continuation}")
    n_context = len(encode_prompt(folder.tokenizer, context))
    if folder.objective == "causal":
        return (
            score(folder.model(), folder.tokenizer, [ids[1:]], objective="causal")[0]
            .token_log_likelihoods[0, n_context - 1 :]
            .sum()
        )
    model, total = folder.model(), 0.0
    for n in range(n_context, len(ids)):  # a pass per token, in which later tokens are unknown
        known = [*ids[:n], *[MASK] * (len(ids) - n), SEP, CLS]
        rank = torch.tensor([[*[0] * n, *[1] * (len(ids) - n), 0, 0]], dtype=torch.int32)
        query_rank = torch.tensor([[*[1] * n_context, *range(1, len(ids) - n_context + 1), 1, 1]], dtype=torch.int32)
        rank[0, n_context:n] = torch.arange(1, n - n_context + 1)
        rank[0, n : len(ids)] = HIDDEN_RANK
        segments = torch.tensor([[0] * (len(ids) + 1) + [2]])
        batch = make_batch(torch.tensor([known]), query_rank, rank, torch.tensor([[n]]), segment_ids=segments)
        logits, _ = model.logits(batch, initial_memory(model.config, 1, mem_len=0))
        total += float(logits[0, 0].log_softmax(-1)[ids[n]])
    return total


def test_multiple_choice_compares_log_likelihoods(path, results):
    for sample in results["samples"]["choice"]:
        actual = [
            response[0][0] if isinstance(response[0], tuple | list) else response[0] for response in sample["resps"]
        ]
        expected = [expected_log_likelihood(path, sample["doc"]["context"], choice) for choice in CHOICES]
        np.testing.assert_allclose(actual, expected, atol=1e-3)
        assert sample["acc"] == (np.argmax(expected) == sample["doc"]["answer"])


def test_rolling_log_likelihoods_are_scores(path, results):
    folder = load_folder(path)
    texts = [row["context"] for row in ROWS]
    mode = "causal" if folder.objective == "causal" else "any-order"
    prefix = "" if mode == "causal" else np.array([EOD])
    scores = score(folder.model(), folder.tokenizer, texts, mode, objective=folder.objective, n_orders=1, prefix=prefix)
    total = sum(text.log_likelihood for text in scores)
    n_bytes = sum(len(text.encode()) for text in texts)
    assert results["results"]["perplexity"]["byte_perplexity,none"] == pytest.approx(np.exp(-total / n_bytes), rel=1e-4)


def test_generation_stops_at_the_strings_of_the_task(path, results):
    folder = load_folder(path)
    texts = [row["context"] for row in ROWS]
    config = GenerationConfig(7, temperature=0, stop=("a",))
    expected = generate(folder.model(), folder.tokenizer, texts, config, objective=folder.objective)
    samples = sorted(results["samples"]["answer"], key=lambda sample: sample["doc_id"])
    assert [sample["resps"][0][0] for sample in samples] == [output.text for output in expected]
    assert all("a" not in output.text for output in expected)


def test_greedy_continuations_are_marked(path):
    from lm_eval.api.instance import Instance

    from xlpre.lm_eval_adapter import HarnessModel

    model, folder = HarnessModel(str(path), device="cpu", free_len=16), load_folder(path)
    config = GenerationConfig(1, temperature=0)
    (greedy,) = generate(folder.model(), folder.tokenizer, ["Ba di"], config, objective=folder.objective)
    pairs = [("Ba di", greedy.text), ("Ba di", " Ke" if greedy.text != " Ke" else " Lo"), ("", "Ba di"), ("Ba di", "")]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    outcomes = model.loglikelihood(requests)
    assert [is_greedy for _, is_greedy in outcomes[:2]] == [True, False]
    assert outcomes[2][0] < 0 and outcomes[3] == (0.0, True)


def test_models_and_settings_that_do_not_fit_are_refused(tokenizer, tmp_path):
    from xlpre.lm_eval_adapter import HarnessModel

    path = write_folder(tmp_path / "model", tokenizer)
    model = HarnessModel(str(path))
    with pytest.raises(ValueError, match=r"num_beams=4 is invalid.*Remove it"):
        model._generation_config({"num_beams": 4})
    config = model._generation_config({"until": "x", "do_sample": True, "temperature": 0.7, "max_gen_toks": 3})
    assert config == GenerationConfig(3, 0.7, top_p=1.0, stop=("x",))
    folder = load_folder(path)
    weights = {name: p.detach() for name, p in LanguageModel(folder.config, False).named_parameters()}
    save_folder(path, ModelFolder(folder.config, weights, tokenizer, "denoising", {}, "xlpre"))
    with pytest.raises(ValueError, match="cannot continue a text"):
        HarnessModel(str(path))
