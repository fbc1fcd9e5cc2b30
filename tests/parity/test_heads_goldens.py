"""Task heads equal the original (zihangdai/xlnet function_builder.py, modeling.py)."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from tests.parity.goldens import files
from tests.parity.xlnet import TOLERANCE, build_config, check_gradients, copy_weights, select
from xlpre.batch import HIDDEN_RANK, make_batch
from xlpre.conversion.tf import weight_map
from xlpre.conversion.weight_maps import FROM_HEADS, TO_HEADS, TRANSPOSED, WeightEntry, to_native
from xlpre.model.backbone import Backbone
from xlpre.model.memory import initial_memory
from xlpre.model.task_heads import ChoiceHead, ClassificationHead, RegressionHead, SpanHead

pytestmark = pytest.mark.usefixtures("by_each_backend")


def dense(native: str, external: str) -> list[WeightEntry]:
    return [
        WeightEntry(f"{native}.weight", f"{external}/kernel", TRANSPOSED),
        WeightEntry(f"{native}.bias", f"{external}/bias"),
    ]


def norm(native: str, external: str) -> list[WeightEntry]:
    return [
        WeightEntry(f"{native}.weight", f"{external}/LayerNorm/gamma"),
        WeightEntry(f"{native}.bias", f"{external}/LayerNorm/beta"),
    ]


SUMMARY = "model/sequnece_summary"  # sic
HEAD = [
    *dense("head.summary.dense", f"{SUMMARY}/summary"),
    WeightEntry("head.summary.pool.start", f"{SUMMARY}/summary_bias"),
    *(
        WeightEntry(f"head.summary.pool.{name}.weight", f"{SUMMARY}/abs_attn/{kernel}/kernel", TO_HEADS)
        for name, kernel in (("query", "q"), ("key", "k"), ("value", "v"))
    ),
    WeightEntry("head.summary.pool.output.weight", f"{SUMMARY}/abs_attn/o/kernel", FROM_HEADS),
    *norm("head.summary.pool.norm", f"{SUMMARY}/abs_attn"),
    *dense("head.logits_proj", "model/classification_demo/logit"),
    *dense("head.logits_proj", "model/regression_demo/logit"),
    *dense("head.logits_proj", "logits/dense"),
    *dense("head.start", "start_logits/dense"),
    *dense("head.end_inner", "end_logits/dense_0"),
    *norm("head.end_norm", "end_logits"),
    *dense("head.end_outer", "end_logits/dense_1"),
    *dense("head.no_answer_inner", "answer_class/dense_0"),
    *dense("head.no_answer_outer", "answer_class/dense_1"),
]


def weights(shape, arrays) -> dict[str, torch.Tensor]:
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return to_native([*weight_map(shape), *HEAD], tensors)


class Model(nn.Module):
    def __init__(self, arrays, config, head) -> None:
        super().__init__()
        self.shape, self.n_choices = build_config(arrays, config), config.get("n_choices", 1)
        self.backbone, self.head = Backbone(self.shape, two_streams=False), head(self.shape)
        copy_weights(self, weights(self.shape, select(arrays, "param")), unused=("backbone.mask_embedding",))

    def hidden(self, arrays, positions=None):
        """Hidden states and padding. The choices of a question, one row of the file, become separate rows."""
        ids = torch.from_numpy(arrays["in/input_ids"]).long()
        T = ids.size(1) // self.n_choices
        ids, segments, padding = (
            torch.from_numpy(arrays[f"in/{name}"]).reshape(-1, T) for name in ("input_ids", "segment_ids", "input_mask")
        )
        B, padding = len(ids), padding > 0
        batch = make_batch(
            ids.long(),
            query_rank=torch.ones(B, T).int(),
            key_rank=torch.where(padding, HIDDEN_RANK, 0).int(),
            target_positions=torch.arange(T).expand(B, -1) if positions is None else positions(B, T),
            segment_ids=segments.long(),
        )
        return self.backbone(batch, initial_memory(self.shape, B, mem_len=0))[0], padding

    def check_gradients(self, arrays) -> None:
        if gradients := weights(self.shape, select(arrays, "grad")):
            check_gradients(self, gradients)


def assert_close(actual, expected):
    np.testing.assert_allclose(actual.detach(), expected, atol=TOLERANCE, rtol=0)


def read(path):
    arrays = dict(np.load(path))
    return arrays, json.loads(str(arrays["config"]))


def head_builder(config):
    pooling, project = config["summary_type"], config.get("use_summ_proj", True)
    if "n_class" in config:
        return lambda shape: ClassificationHead(shape, config["n_class"], pooling, project)
    if "n_choices" in config:
        return lambda shape: ChoiceHead(shape, config["n_choices"], pooling, project)
    return lambda shape: RegressionHead(shape, pooling, project)


@pytest.mark.parametrize(
    "path",
    files("xlnet_finetune_cls_*.npz") + files("xlnet_finetune_reg*.npz") + files("xlnet_finetune_race*.npz"),
)
def test_classification_regression_and_choice_heads_equal_the_original(path):
    arrays, config = read(path)
    model = Model(arrays, config, head_builder(config))
    hidden, padding = model.hidden(arrays)
    if "out/hidden" in arrays:
        assert_close(hidden.transpose(0, 1), arrays["out/hidden"])
        assert_close(model.head.summary(hidden, padding), arrays["out/summary"])
    logits = model.head(hidden, padding)
    assert_close(logits, arrays["out/logits"])
    labels = torch.from_numpy(arrays["in/label_ids"])
    losses = model.head.losses(logits, labels if labels.is_floating_point() else labels.long())
    assert_close(losses, arrays["out/per_example_loss"])
    assert_close(losses.mean(), arrays["out/total_loss"])
    losses.mean().backward()
    model.check_gradients(arrays)
    # the last layer computes only the positions that the head reads
    at_positions, _ = model.hidden(arrays, model.head.summary.positions)
    assert_close(model.head(at_positions, padding), arrays["out/logits"])


@pytest.mark.parametrize("path", files("xlnet_finetune_squad_*.npz"))
def test_span_heads_equal_the_original(path):
    arrays, config = read(path)
    model = Model(arrays, config, SpanHead)
    hidden, _ = model.hidden(arrays)
    excluded, cls = torch.from_numpy(arrays["in/p_mask"]) > 0, torch.from_numpy(arrays["in/cls_index"]).long()
    if "start_n_top" in config:
        beams = model.head.beams(hidden, excluded, cls, config["start_n_top"], config["end_n_top"])
        assert_close(beams.start, arrays["out/start_top_log_probs"])
        assert_close(beams.end.flatten(1), arrays["out/end_top_log_probs"])
        assert_close(beams.no_answer, arrays["out/cls_logits"])
        assert (beams.start_position.numpy() == arrays["out/start_top_index"]).all()
        assert (beams.end_position.flatten(1).numpy() == arrays["out/end_top_index"]).all()
        return
    start, end = (torch.from_numpy(arrays[f"in/{name}_positions"]).long() for name in ("start", "end"))
    scores = model.head(hidden, excluded, cls, start)
    allowed = ~excluded.numpy()
    assert_close(scores.start[allowed], arrays["out/start_log_probs"][allowed])
    assert_close(scores.end[allowed], arrays["out/end_log_probs"][allowed])
    assert_close(scores.no_answer, arrays["out/cls_logits"])
    loss = model.head.losses(scores, start, end, torch.from_numpy(arrays["in/is_impossible"])).mean()
    assert_close(loss, arrays["out/total_loss"])
    loss.backward()
    model.check_gradients(arrays)
