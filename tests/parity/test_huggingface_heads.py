"""An exported fine-tuned model has the same outputs in Hugging Face's XLNet."""

import dataclasses

import numpy as np
import pytest
import torch

from finetune.config import TaskDataConfig
from finetune.data.batching import LengthBucketSampler
from finetune.export import main
from finetune.tasks.registry import build_task
from finetune.tasks.span import span_masks
from finetune.trainer.inference import predict_lines
from finetune.trainer.task_model import TaskModel
from xlpre.conversion.hf_heads import HEADS, head_to_huggingface
from xlpre.conversion.model_folder import ModelFolder
from xlpre.conversion.task_model_folder import TaskModelFolder, load_task_model, save_task_model
from xlpre.model.config import ModelConfig
from xlpre.model.language_model import LanguageModel
from xlpre.model.task_heads import SpanHead

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-5
SHAPE = ModelConfig(vocab_size=300, n_layer=2, d_model=32, n_head=4, d_inner=64, mem_len=0, init_std=0.1)
QUESTION = {"article": "Ba be bi bo bu.", "question": "Da _ di?", "options": ["fa", "fe fi fo", "fu", "ga ge"]}
QUESTIONS = [QUESTION, {**QUESTION, "article": "Ka."}]
PAIRS = [{"one": "Ba be.", "two": "Bi."}, {"one": "Bo bu ba bi", "two": "be"}]
TASKS = [
    ("classify", {"text": ["one", "two"], "labels": ["good", "bad", "none"]}, "last"),
    ("classify", {"text": ["one"], "labels": ["good", "bad"]}, "first"),
    ("regress", {"text": ["one", "two"]}, "last"),
    ("regress", {"text": ["one", "two"], "label_scale": [3.5, 0.25]}, "last"),
    ("race", {}, "last"),
]


def make_finetuned(tokenizer, task, pooling):
    torch.manual_seed(3)
    pretrained = {name: p.detach() for name, p in LanguageModel(SHAPE, True).named_parameters()}
    model = TaskModel(SHAPE, task).eval()
    weights = {name: 0.2 * torch.randn_like(p) for name, p in model.named_parameters()}
    for name in weights:
        if "norm" in name and name.endswith("weight"):
            weights[name] += 1
    folder = ModelFolder(SHAPE, pretrained, tokenizer, "permutation", {"step": 3}, "xlpre")
    metadata = {"task": task.name, "data": task.data_settings(), "pooling": pooling, "labels": list(task.label_names)}
    return TaskModelFolder.from_finetuned(folder, SHAPE, weights, metadata, {"step": 5})


@pytest.mark.parametrize(("name", "settings", "pooling"), TASKS)
def test_exported_logits_equal_those_of_hugging_face(name, settings, pooling, tokenizer, tmp_path):
    task = build_task(name, TaskDataConfig(**settings), pooling)
    model_folder = make_finetuned(tokenizer, task, pooling)
    save_task_model(tmp_path / "native", model_folder)
    main([str(tmp_path / "native"), str(tmp_path / "external")])
    lines = QUESTIONS if name == "race" else PAIRS
    examples = [task.parse_example(fields, "") for fields in lines]
    (batch,) = LengthBucketSampler(task.encode(examples, tokenizer), task.padding_side, 0, 1, 10**6).eval_batches(2)
    native = TaskModel(SHAPE, task).eval()
    native.load_available(load_task_model(tmp_path / "native").weights)
    outputs = native.predict(batch)["logits"]
    if name == "regress":
        outputs = torch.from_numpy(task.predict_values({"logits": outputs.numpy()})).float()

    auto = (
        transformers.AutoModelForMultipleChoice if name == "race" else transformers.AutoModelForSequenceClassification
    )
    external = auto.from_pretrained(tmp_path / "external").eval()
    assert external.config.problem_type == {"classify": "single_label_classification", "regress": "regression"}.get(
        name
    )
    if name == "classify":
        assert [external.config.id2label[i] for i in range(len(task.label_names))] == task.label_names
    inputs = {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.segment_ids,
        "attention_mask": (~batch.padding_mask).float(),
    }
    if name == "race":
        inputs = {key: x.view(2, 4, -1) for key, x in inputs.items()}
    with torch.no_grad():
        logits = external(**inputs).logits
    assert outputs.abs().max() > 0.1
    torch.testing.assert_close(outputs, logits.view(outputs.shape), atol=TOLERANCE, rtol=0)


def test_exported_spans_equal_those_of_hugging_face(tokenizer, tmp_path):
    settings = {"max_seq_len": 40, "max_question_len": 8, "doc_stride": 8}
    task = build_task("squad/2.0", TaskDataConfig(**settings), "last")
    save_task_model(tmp_path / "native", make_finetuned(tokenizer, task, "last"))
    main([str(tmp_path / "native"), str(tmp_path / "external")])
    contexts = ["Ba be bi bo bu. " * 4, "Ka ke ki ko da de di."]
    examples = [task.parse_example({"context": context, "question": "Da di?"}, "") for context in contexts]
    features = task.encode(examples, tokenizer)
    assert len(features) > 2 and len({feature.length for feature in features}) > 1
    (batch,) = LengthBucketSampler(features, task.padding_side, 0, 1, 10**6).eval_batches(len(features))
    native = TaskModel(SHAPE, task).eval()
    native.load_available(load_task_model(tmp_path / "native").weights)
    outputs = native.predict(batch)

    external = transformers.XLNetForQuestionAnswering.from_pretrained(tmp_path / "external").eval()
    excluded, cls = span_masks(batch)
    inputs = {
        "input_ids": batch.input_ids,
        "token_type_ids": batch.segment_ids,
        "attention_mask": (~batch.padding_mask).float(),
    }
    with torch.no_grad():
        beams = external(**inputs, cls_index=cls, p_mask=excluded.float())
    B, S, N = outputs["end"].shape  # in transformers: probabilities, and (B, N, S) for ends
    torch.testing.assert_close(outputs["start"].exp(), beams.start_top_log_probs, atol=TOLERANCE, rtol=0)
    ends = beams.end_top_log_probs.view(B, N, S).transpose(1, 2)
    torch.testing.assert_close(outputs["end"].exp(), ends, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(outputs["no_answer"], beams.cls_logits, atol=TOLERANCE, rtol=0)
    assert torch.equal(outputs["start_position"], beams.start_top_index)
    assert torch.equal(outputs["end_position"], beams.end_top_index.view(B, N, S).transpose(1, 2))


def test_training_losses_equal_those_of_hugging_face(tokenizer, tmp_path):
    name, settings, pooling = TASKS[0]
    task = build_task(name, TaskDataConfig(**settings), pooling)
    shape = dataclasses.replace(SHAPE, dropout=0.0, dropatt=0.0)
    model_folder = make_finetuned(tokenizer, task, pooling)
    model_folder = dataclasses.replace(model_folder, folder=dataclasses.replace(model_folder.folder, config=shape))
    save_task_model(tmp_path / "native", model_folder)
    main([str(tmp_path / "native"), str(tmp_path / "external")])
    external = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "external").train()
    native = TaskModel(shape, task).train()
    native.load_available(model_folder.weights)
    labels = ["good", "bad", "none"]
    lines = [{"one": "ba " * (2 * i + 1), "two": "be bi", "label": labels[i % 3]} for i in range(6)]
    features = task.encode([task.parse_example(fields, "") for fields in lines], tokenizer)
    micro_step = LengthBucketSampler(features, "left", 0, 1, 8).micro_steps(
        seed=1, step=0, batch_size=6, accumulation_steps=1
    )[0]
    (full_batch,) = (
        LengthBucketSampler(features, "left", 0, 1, 10**6)
        .micro_steps(seed=1, step=0, batch_size=6, accumulation_steps=1)[0]
        .batches
    )
    assert len(micro_step.batches) > 1 and micro_step.n_padded_tokens < full_batch.input_ids.numel()
    padded = {
        "input_ids": full_batch.input_ids,
        "token_type_ids": full_batch.segment_ids,
        "attention_mask": (~full_batch.padding_mask).float(),
    }
    loss_curves = []
    for model, loss in (
        (native, lambda: native(micro_step)),
        (external, lambda: external(**padded, labels=full_batch.labels["label"]).loss),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
        loss_curves.append([])
        for _ in range(6):
            optimizer.zero_grad()
            loss().backward()
            loss_curves[-1].append(loss().item())
            optimizer.step()
    assert loss_curves[0][5] < loss_curves[0][0] - 0.1
    assert loss_curves[0] == pytest.approx(loss_curves[1], abs=1e-4)


def test_the_exported_tokenizer_builds_the_same_row_of_a_pair(tokenizer, tmp_path):
    name, settings, pooling = TASKS[0]
    task = build_task(name, TaskDataConfig(**settings), pooling)
    save_task_model(tmp_path / "native", make_finetuned(tokenizer, task, pooling))
    main([str(tmp_path / "native"), str(tmp_path / "external")])
    external = transformers.AutoTokenizer.from_pretrained(tmp_path / "external")("Ba be.", "Bi bo.")
    row = task.encode([task.parse_example({"one": "Ba be.", "two": "Bi bo."}, "")], tokenizer)[0].rows[0]
    assert external["input_ids"] == row.input_ids.tolist() and external["token_type_ids"] == row.segment_ids.tolist()


@pytest.mark.parametrize("pooling", ["last", "first"])
def test_the_exported_tokenizer_gives_the_same_predictions_for_a_padded_batch(pooling, tokenizer, tmp_path):
    settings = {"text": ["one"], "labels": ["good", "bad"]}
    task = build_task("classify", TaskDataConfig(**settings), pooling)
    save_task_model(tmp_path / "native", make_finetuned(tokenizer, task, pooling))
    main([str(tmp_path / "native"), str(tmp_path / "external")])
    texts = ["Ba be bi bo bu da de.", "Ka."]
    lines = [(text, {"one": text}) for text in texts]
    outputs = [
        result["probabilities"]["good"] for result in predict_lines(load_task_model(tmp_path / "native"), task, lines)
    ]
    batch = transformers.AutoTokenizer.from_pretrained(tmp_path / "external")(texts, padding=True, return_tensors="pt")
    assert not batch["attention_mask"].all()
    external = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "external").eval()
    with torch.no_grad():
        logits = external(**batch).logits
    assert logits.softmax(1)[:, 0].tolist() == pytest.approx(outputs, abs=TOLERANCE)


def test_the_weight_map_of_spans_covers_every_weight_of_the_head():
    config = transformers.XLNetConfig(vocab_size=300, d_model=32, n_layer=1, n_head=4, d_inner=64)
    external = transformers.XLNetForQuestionAnswering(config).state_dict()
    head = {name: p.detach() for name, p in SpanHead(SHAPE).named_parameters()}
    settings, weights = head_to_huggingface(SHAPE, head, "span", [])
    assert {name for name in external if not name.startswith("transformer.")} == weights.keys()
    assert all(external[name].shape == weight.shape for name, weight in weights.items())
    assert settings == {"architectures": [HEADS["span"].architecture]}


def test_settings_without_a_counterpart_in_hugging_face_are_refused(tokenizer, tmp_path):
    name, settings, _ = TASKS[0]
    task = build_task(name, TaskDataConfig(**settings), "attn")
    model_folder = make_finetuned(tokenizer, task, "attn")
    save_task_model(tmp_path / "native", model_folder)
    with pytest.raises(ValueError, match="model.pooling=attn .*Hugging Face.*last or first"):
        main([str(tmp_path / "native"), str(tmp_path / "external")])
    shape = dataclasses.replace(SHAPE, norm="pre")
    save_task_model(
        tmp_path / "pre",
        dataclasses.replace(model_folder, folder=dataclasses.replace(model_folder.folder, config=shape)),
    )
    with pytest.raises(ValueError, match="model.norm=pre "):
        main([str(tmp_path / "pre"), str(tmp_path / "external")])
    assert np.array_equal(sorted(path.name for path in tmp_path.iterdir()), ["native", "pre"])
