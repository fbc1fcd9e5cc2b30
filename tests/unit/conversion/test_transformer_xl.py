"""All formats of one Transformer-XL give the same model; settings that do not fit the weights are refused."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from pretrain import export
from xlpre.batch import make_batch
from xlpre.conversion.model_folder import load_folder
from xlpre.conversion.tf_checkpoint import write_checkpoint
from xlpre.conversion.transformer_xl import config_from
from xlpre.model.memory import initial_memory

ARGUMENTS = {
    "n_token": 30,
    "n_layer": 2,
    "n_head": 2,
    "d_model": 8,
    "d_head": 4,
    "d_inner": 12,
    "dropout": 0.2,
    "dropatt": 0.25,
    "tie_weight": True,
    "d_embed": None,
    "div_val": 1,
    "tie_projs": [False],
    "pre_lnorm": False,
    "tgt_len": 5,
    "ext_len": 0,
    "mem_len": 6,
    "cutoffs": [],
    "same_length": False,
    "attn_type": 0,
    "clamp_len": -1,
}
ADAPTIVE = {"cutoffs": [8, 20], "div_val": 2, "tie_projs": [False, True, True]}
VARIANTS = {
    "plain": {},
    "pre-norm, same length, clamped": {"pre_lnorm": True, "same_length": True, "clamp_len": 4},
    "shaw": {"attn_type": 1, "clamp_len": 4},
    "sinusoidal": {"attn_type": 2},
    "learned, pre-norm": {"attn_type": 3, "pre_lnorm": True},
    "untied": {"tie_weight": False},
    "narrow embedding": {"d_embed": 6, "tie_projs": [True]},
    "narrow untied embedding": {"d_embed": 6, "tie_weight": False},
    "cutoffs": {"cutoffs": [8, 20], "tie_projs": [False, False, False]},
    "cutoffs, narrow": {"cutoffs": [8, 20], "d_embed": 6, "tie_projs": [False, True, False]},
    "adaptive": ADAPTIVE,
    "adaptive, untied": {**ADAPTIVE, "tie_weight": False, "tie_projs": [False] * 3},
}


class Part(nn.Module):
    """Module with given attributes, for files in which it stands for classes of the original."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def random_parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


def build_original(**changes):
    """Module with the attributes, parameters and ties of the original's `MemTransformerLM`, and random weights."""
    torch.manual_seed(5)
    a = {**ARGUMENTS, **changes}
    a["d_embed"] = a["d_embed"] or a["d_model"]
    max_klen = a["tgt_len"] + a["ext_len"] + a["mem_len"]
    width, heads = a["n_head"] * a["d_head"], (a["n_head"], a["d_head"])
    bounds = [0, *a["cutoffs"], a["n_token"]]
    widths = [a["d_embed"] // a["div_val"] ** i for i in range(len(bounds) - 1)]
    sizes = np.diff(bounds).tolist() if a["div_val"] > 1 else [a["n_token"]]
    projected = a["div_val"] > 1 or a["d_embed"] != a["d_model"]
    shared = {"n_token": a["n_token"], "cutoffs": [*a["cutoffs"], a["n_token"]], "div_val": a["div_val"]}
    tables = [nn.Embedding(size, w) for size, w in zip(sizes, widths, strict=False)]
    projections = [random_parameter(a["d_model"], w) for _, w in zip(sizes, widths, strict=False)] if projected else []
    word_emb = Part(emb_layers=nn.ModuleList(tables), emb_projs=nn.ParameterList(projections), **shared)
    out_layers = [nn.Linear(w, size) for size, w in zip(sizes, widths, strict=False)]
    out_projs = [random_parameter(a["d_model"], w) if projected else None for w in widths]
    for i, layer in enumerate(out_layers):
        if a["tie_weight"]:
            layer.weight = tables[i].weight
    for i, tied in enumerate(a["tie_projs"]):
        if tied and projected:
            out_projs[i] = projections[i if a["div_val"] > 1 else 0]
    crit = Part(out_layers=nn.ModuleList(out_layers), out_projs=nn.ParameterList(out_projs), **shared)
    if a["cutoffs"]:
        crit.cluster_weight = random_parameter(len(a["cutoffs"]), a["d_embed"])
        crit.cluster_bias = random_parameter(len(a["cutoffs"]))
    layers = []
    for _ in range(a["n_layer"]):
        linear = lambda *shape: nn.Linear(*shape, bias=False)  # noqa: E731
        attention = {"dropatt": nn.Dropout(a["dropatt"]), "o_net": linear(width, a["d_model"])}
        if a["attn_type"] in (0, 1):
            attention["qkv_net"] = linear(a["d_model"], 3 * width)
        else:
            attention |= {"q_net": linear(a["d_model"], width), "kv_net": linear(a["d_model"], 2 * width)}
        if a["attn_type"] == 0:
            attention["r_net"] = linear(a["d_model"], width)
        core = nn.Sequential(nn.Linear(a["d_model"], a["d_inner"]), nn.ReLU(), nn.Dropout(a["dropout"]))
        core.extend([nn.Linear(a["d_inner"], a["d_model"]), nn.Dropout(a["dropout"])])
        norms = [nn.LayerNorm(a["d_model"]) for _ in range(2)]
        for norm in norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
        common = {"pre_lnorm": a["pre_lnorm"]}
        layers.append(
            Part(
                dec_attn=Part(**attention, layer_norm=norms[0], **common),
                pos_ff=Part(CoreNet=core, layer_norm=norms[1], d_inner=a["d_inner"], **common),
            )
        )
    names = (
        "n_token",
        "n_layer",
        "n_head",
        "d_model",
        "d_head",
        "d_embed",
        "tgt_len",
        "ext_len",
        "mem_len",
        "attn_type",
    )
    attributes = {name: a[name] for name in (*names, "same_length", "clamp_len")}
    model = Part(**attributes, max_klen=max_klen, word_emb=word_emb, drop=nn.Dropout(a["dropout"]))
    model.layers, model.crit = nn.ModuleList(layers), crit
    if a["attn_type"] == 0:
        model.r_w_bias, model.r_r_bias = random_parameter(*heads), random_parameter(*heads)
    if a["attn_type"] in (1, 3):
        model.r_emb = random_parameter(a["n_layer"], max_klen, *heads)
    if a["attn_type"] == 1:
        model.r_w_bias, model.r_bias = (
            random_parameter(a["n_layer"], *heads),
            random_parameter(a["n_layer"], max_klen, a["n_head"]),
        )
    return model


def save(content, path):
    """Save in the legacy format, as the original did."""
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def write_settings(folder, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "transfo-xl", **settings}))
    return folder


def equal(weights, others) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def losses(folder):
    ids = torch.arange(12).view(2, 6) * 7 % 30
    positions = torch.arange(6).expand(2, -1)
    targets = (ids + 11) % 30
    ranks = {"query_rank": (positions + 1).int(), "key_rank": positions.int(), "target_positions": positions}
    batch = make_batch(ids, **ranks, targets=targets, visible_mem_len=torch.full((2,), 100), reuse_len=6)
    model, memory, result = folder.model(), initial_memory(folder.config, 2), []
    with torch.no_grad():
        for _ in range(2):
            hidden, memory = model.backbone(batch, memory)
            result.append(model.lm_head(hidden, targets))
    return torch.stack(result)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_and_its_state_dict_give_the_config_of_the_constructor_and_the_same_weights(name, tmp_path):
    arguments = {**ARGUMENTS, **VARIANTS[name]}
    original = build_original(**VARIANTS[name])
    folder = load_folder(save(original, tmp_path / "original" / "model.pt"))
    assert (folder.kind, folder.objective, folder.tokenizer) == ("transformer-xl", "causal", None)
    expected = config_from(arguments)
    unused = {} if folder.config.has_embedding_projection else {"tie_projections": expected.tie_projections}
    assert dataclasses.replace(folder.config, **unused) == expected
    assert sum(w.numel() for w in folder.weights.values()) >= sum(p.numel() for p in original.parameters())
    assert equal(load_folder(tmp_path / "original").weights, folder.weights)
    settings = write_settings(tmp_path / "weights", **arguments)
    from_weights = load_folder(save(original.state_dict(), settings / "weights.pt"))
    assert from_weights.config == folder.config and equal(from_weights.weights, folder.weights)


def as_huggingface(original, per_layer):
    """State dict by the names, shapes and order of clusters of Hugging Face's TransfoXLLMHeadModel."""
    weights = dict(original.state_dict())
    for name in ("r_w_bias", "r_r_bias"):
        bias = weights.pop(name) if per_layer else weights[name]
        weights |= {f"layers.{i}.dec_attn.{name}": bias.clone() for i in range(len(original.layers))}
    for name in ("crit.cluster_weight", "crit.cluster_bias"):
        if name in weights:
            weights[name] = weights[name].flip(0)
    return {name if name.startswith("crit.") else f"transformer.{name}": weight for name, weight in weights.items()}


HF_NAMES = {"n_token": "vocab_size"}


@pytest.mark.parametrize("per_layer", [True, False])
@pytest.mark.parametrize("name", ["plain", "cutoffs, narrow", "adaptive"])
def test_a_folder_of_hugging_face_gives_the_losses_of_the_original(name, per_layer, tmp_path):
    arguments = {HF_NAMES.get(key, key): value for key, value in {**ARGUMENTS, **VARIANTS[name]}.items()}
    original = build_original(**VARIANTS[name])
    expected = load_folder(save(original, tmp_path / "model.pt"))
    for unknown in ("tie_projs", "tgt_len", "ext_len", "tie_weight"):
        del arguments[unknown]
    folder = write_settings(
        tmp_path / "hf", **arguments, tie_word_embeddings=True, layer_norm_epsilon=1e-5, untie_r=per_layer
    )
    save(as_huggingface(original, per_layer), folder / "pytorch_model.bin")
    (folder / "vocab.pkl").write_bytes(b"not read")
    actual = load_folder(folder)
    assert actual.config == dataclasses.replace(expected.config, untie_r=per_layer)
    assert torch.equal(losses(actual), losses(expected))


def as_tensorflow(original):
    """Variables of the original's TensorFlow code."""
    weights = {name: weight.numpy() for name, weight in original.state_dict().items()}
    emb, soft = "transformer/adaptive_embed", "transformer/adaptive_softmax"
    variables = {f"transformer/{name}": weights[name] for name in ("r_w_bias", "r_r_bias")}
    bounds = [0, *original.crit.cutoffs]
    for i, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        clusters = len(bounds) > 2
        own = original.word_emb.div_val > 1
        if own or i == 0:
            scope = f"{emb}/cutoff_{i}" if own else emb
            variables[f"{scope}/lookup_table"] = weights[f"word_emb.emb_layers.{i}.weight"]
            if f"word_emb.emb_projs.{i}" in weights:
                variables[f"{scope}/proj_W"] = weights[f"word_emb.emb_projs.{i}"].T
        bias = weights[f"crit.out_layers.{i}.bias"] if own else weights["crit.out_layers.0.bias"][low:high]
        variables[f"{soft}/cutoff_{i}/b" if clusters else f"{soft}/bias"] = bias
        projection = original.crit.out_projs[i] if clusters else None
        if projection is not None and not any(projection is other for other in original.word_emb.emb_projs):
            variables[f"{soft}/cutoff_{i}/proj"] = projection.detach().numpy().T
    if len(bounds) > 2:
        variables[f"{soft}/cutoff_0/cluster_W"] = weights["crit.cluster_weight"][::-1]
        variables[f"{soft}/cutoff_0/cluster_b"] = weights["crit.cluster_bias"][::-1]
    for i in range(len(original.layers)):
        scope, layer = f"transformer/layer_{i}", f"layers.{i}"
        for kernel in ("qkv", "r", "o"):
            variables[f"{scope}/rel_attn/{kernel}/kernel"] = weights[f"{layer}.dec_attn.{kernel}_net.weight"].T
        for dense, index in (("layer_1", 0), ("layer_2", 3)):
            variables[f"{scope}/ff/{dense}/kernel"] = weights[f"{layer}.pos_ff.CoreNet.{index}.weight"].T
            variables[f"{scope}/ff/{dense}/bias"] = weights[f"{layer}.pos_ff.CoreNet.{index}.bias"]
        for tf_scope, part in (("rel_attn", "dec_attn"), ("ff", "pos_ff")):
            variables[f"{scope}/{tf_scope}/LayerNorm/gamma"] = weights[f"{layer}.{part}.layer_norm.weight"]
            variables[f"{scope}/{tf_scope}/LayerNorm/beta"] = weights[f"{layer}.{part}.layer_norm.bias"]
    slots = {f"{name}/Adam": array for name, array in variables.items()}
    return variables | slots | {"global_step": np.array(7, np.int64)}


@pytest.mark.parametrize("name", ["plain", "narrow embedding", "cutoffs", "cutoffs, narrow", "adaptive"])
def test_a_tensorflow_checkpoint_gives_the_weights_of_the_original(name, tmp_path):
    original = build_original(**VARIANTS[name], same_length=True)
    expected = load_folder(save(original, tmp_path / "model.pt"))
    folder = write_settings(tmp_path / "tf", **{**ARGUMENTS, **VARIANTS[name], "same_length": True})
    write_checkpoint(folder / "model.ckpt-1000", as_tensorflow(original))
    actual = load_folder(folder)
    # the TensorFlow code has its own epsilon and mask
    assert actual.config == dataclasses.replace(expected.config, norm_eps=1e-12, attention_span="same_length")
    assert equal(actual.weights, expected.weights)


def test_a_half_precision_model_becomes_fp32_and_ext_len_is_left_out_with_a_warning(tmp_path):
    original = build_original(**ADAPTIVE, ext_len=2).half()
    with pytest.warns(UserWarning, match="ext_len=2 is a setting of the data"):
        folder = load_folder(save(original, tmp_path / "model.pt"))
    assert folder.config.tie_embedding and folder.config.tie_projections == [False, True, True]
    assert all(weight.dtype == torch.float32 for weight in folder.weights.values())


def changed(path, value):
    """Return a model in which an attribute has another value."""
    model = build_original()
    *modules, name = path.split(".")
    setattr(model.get_submodule(".".join(modules)), name, value)
    return model


def nested(depth):
    """Return a small object that takes 2^depth characters as text."""
    value = ()
    for _ in range(depth):
        value = (value, value)
    return value


def without(name):
    model = build_original()
    delattr(model, name)
    return model


def with_nan():
    model = build_original()
    model.r_w_bias.data[0, 0] = torch.nan
    return model


INVALID = {
    "n_layer is larger": (lambda: changed("n_layer", 3), "2 layers and 0 cutoffs"),
    "n_layer is huge": (lambda: changed("n_layer", 10**12), "more than 1000 layers"),
    "n_layer is a text": (lambda: changed("n_layer", "${oc.env:HOME}"), "n_layer must be a number"),
    "n_layer is a tensor": (lambda: changed("n_layer", torch.tensor(2)), "n_layer must be a number"),
    "d_model is huge": (lambda: changed("d_model", 2**47), "missing from the weights"),
    "d_head is negative": (lambda: changed("d_head", -4), "d_head"),
    "mem_len is None": (lambda: changed("mem_len", None), "mem_len"),
    "n_token is None": (lambda: changed("n_token", None), "n_token must be a number"),
    "max_klen is nested": (lambda: changed("max_klen", nested(20)), "max_klen must be a number"),
    "attn_type is unknown": (lambda: changed("attn_type", 7), "attn_type=7"),
    "attn_type is another": (lambda: changed("attn_type", 2), "not in the model|missing"),
    "clamp_len is None": (lambda: changed("clamp_len", None), "wrong type"),
    "cutoffs is a number": (lambda: changed("word_emb.cutoffs", 7), "not a MemTransformerLM"),
    "cutoffs without clusters": (lambda: changed("word_emb.cutoffs", [10, 30]), "0 cutoffs, but its settings state 2 and 1"),
    "div_val is huge": (lambda: changed("word_emb.div_val", 2**40), "div_value"),
    "n_token is another": (lambda: changed("n_token", 31), "shape"),
    "no softmax": (lambda: without("crit"), "lm_head"),
    "no layers": (lambda: without("layers"), "not a MemTransformerLM"),
    "another module": (lambda: nn.Linear(2, 2), r"torch\S*Linear is not a MemTransformerLM"),
    "another object": (lambda: [1, 2], "neither a model nor a state dict"),
    "not finite": (with_nan, "r_w_bias has infinite or NaN"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_a_model_that_does_not_fit_its_attributes_is_refused(name, tmp_path):
    build, problem = INVALID[name]
    with pytest.raises(ValueError, match=problem) as caught:
        load_folder(save(build(), tmp_path / "model.pt"))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_state_dict_needs_its_settings(tmp_path):
    weights = build_original().state_dict()
    file = save(weights, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match="a state dict has no settings.*config.json"):
        load_folder(file)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "xlnet"}))
    with pytest.raises(ValueError, match="must hold model_type 'transfo-xl'"):
        load_folder(file)
    write_settings(tmp_path, **{key: value for key, value in ARGUMENTS.items() if key != "n_head"})
    with pytest.raises(ValueError, match="n_head is missing"):
        load_folder(file)
    with pytest.raises(ValueError, match="neither model.safetensors nor pytorch_model.bin"):
        load_folder(tmp_path)


def test_several_checkpoints_in_one_folder_are_refused(tmp_path):
    folder = write_settings(tmp_path / "tf", **ARGUMENTS)
    for name in ("one", "two"):
        write_checkpoint(folder / name, {"x": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="several TensorFlow checkpoints"):
        load_folder(folder)


def test_the_export_command_writes_a_folder_without_a_vocabulary(tmp_path, capsys):
    file = save(build_original(**ADAPTIVE), tmp_path / "model.pt")
    export.main([str(file), str(tmp_path / "native")])
    assert "no vocabulary" in capsys.readouterr().out
    original, exported = load_folder(file), load_folder(tmp_path / "native")
    assert exported.config == original.config and exported.tokenizer is None and exported.objective == "causal"
    assert equal(exported.weights, original.weights)
    assert torch.equal(losses(exported), losses(original))
    card = (tmp_path / "native" / "README.md").read_text()
    assert "the folder has no vocabulary" in card and "trained with xlpre" not in card
    with pytest.raises(ValueError, match="saved without a vocabulary, which text needs"):
        exported.require_tokenizer(tmp_path / "native")
    with pytest.raises(ValueError, match="is invalid for Hugging Face's XLNet"):
        export.main([str(file), str(tmp_path / "hf"), "--hf"])
    assert not (tmp_path / "hf").exists()


def test_an_invalid_ext_len_is_not_printed(tmp_path, recwarn):
    load_folder(save(changed("ext_len", nested(20)), tmp_path / "model.pt"))
    assert not recwarn.list


def test_a_tensorflow_checkpoint_of_another_model_is_refused(tmp_path):
    settings = {"n_token": 30, "n_layer": 2, "n_head": 2, "d_model": 8, "d_head": 4, "d_inner": 16, "mem_len": 4}
    write_settings(tmp_path, **settings)
    write_checkpoint(tmp_path / "model.ckpt", {"bert/embeddings/word_embeddings": np.zeros((3, 2), "f4")})
    with pytest.raises(ValueError, match=str(tmp_path)):
        load_folder(tmp_path)
