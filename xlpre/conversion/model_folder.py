"""Model folder: weights in safetensors, config, vocabulary and provenance. It contains no pickled data.

model.safetensors   fp32 weights by their parameter names in xlpre/model, including a trained next-sentence head
config.json         `format_version`, `model` (ModelConfig), `objective` (its name), and a checksum of the weights
spiece.model        SentencePiece vocabulary; absent if the model was converted from a format without one
vocabulary.json     in place of spiece.model: a table of bytes, characters or words
provenance.json     kind and hash of the vocabulary, special ids, data fingerprint, step, revision, versions

`load_folder` also reads folders of Hugging Face's XLNet and of the original TensorFlow release, and the formats of Transformer-XL
(transformer_xl.py); it recognizes them by their files. It accepts the folder of a run in place of its model folder. `save_huggingface` and
`save_tensorflow` write the other formats.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xlpre.common.errors import InputError
from xlpre.common.files import FileEntries, atomic_dir, write_bytes
from xlpre.common.os_errors import is_out_of_memory
from xlpre.common.safetensors_io import check_finite
from xlpre.conversion import hf, native_format, tf, transformer_xl
from xlpre.conversion.hf_tokenizer import read_preprocess, read_vocabulary, write_tokenizer
from xlpre.conversion.provenance import (
    CONVERTED_FROM,
    PROVENANCE_FILE,
    check_vocabulary,
    read_provenance,
    write_provenance,
)
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights
from xlpre.model.language_model import LanguageModel, meta_model
from xlpre.objectives.registry import OBJECTIVES, resolve_objective
from xlpre.text.load_tokenizer import load_tokenizer
from xlpre.text.preprocess import Preprocess
from xlpre.text.sentencepiece_tokenizer import SentencePieceTokenizer
from xlpre.text.table_tokenizer import TableTokenizer
from xlpre.text.tokenizer import Tokenizer, check_vocab_size

CARD_FILE = "README.md"
MASKED_LM_CODE = Path(__file__).with_name("modeling_masked_lm.py")
READABLE = (
    "a model folder of xlpre (config.json), a folder of Hugging Face's XLNet (config.json), "
    f"a TensorFlow release ({tf.CONFIG_FILE}), or the {transformer_xl.MODEL_FILE} of a Transformer-XL"
)


@dataclass(frozen=True)
class ModelFolder:
    """Content of a model folder.

    Attributes:
        config: model config.
        weights: fp32 weights by their parameter names in xlpre/model.
        tokenizer: vocabulary, or None if the folder has none. Without provenance, its preprocessing is read from tokenizer_config.json;
            without that file, it is `cased`, as in the published models.
        objective: name of the pretraining objective.
        provenance: fields of provenance.json; empty if there is no such file.
        kind: `xlpre`, `huggingface`, `tensorflow` or `transformer-xl`.
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer | None
    objective: str
    provenance: dict[str, Any]
    kind: str

    @classmethod
    def from_model(cls, model: LanguageModel, tokenizer: Tokenizer, objective: str, **provenance: Any) -> ModelFolder:
        """Return the folder content of a model in memory, with a copy of its weights on the CPU in fp32.

        Args:
            model: language model, on any device and in any precision.
            tokenizer: its vocabulary.
            objective: name of its pretraining objective. For a custom objective, give `permutation` if the model has two streams,
                else `denoising`.
            provenance: more fields for provenance.json.

        Raises:
            InputError: an unknown objective, an objective with another number of streams, or a vocabulary of another size.
        """
        objective = resolve_objective(objective, model.backbone.two_streams)
        check_vocab_size(tokenizer, model.config.vocab_size)
        weights = {name: p.detach().to("cpu", torch.float32, copy=True) for name, p in model.named_parameters()}
        return cls(model.config, weights, tokenizer, objective, provenance, "xlpre")

    @property
    def next_sentence(self) -> bool:
        """True if the weights include a next-sentence head."""
        return any(name.startswith("auxiliary_heads.next_sentence.") for name in self.weights)

    def model(self) -> LanguageModel:
        """Return the language model in evaluation mode."""
        two_streams = OBJECTIVES[self.objective].two_streams
        return build_with_weights(
            self.weights, lambda: LanguageModel(self.config, two_streams, self.next_sentence)
        ).eval()

    def encoder(self) -> Backbone:
        """Return the backbone in evaluation mode, with the content stream only, as fine-tuning uses it."""
        return build_with_weights(self.weights, lambda: LanguageModel(self.config, two_streams=False)).eval().backbone

    def require_tokenizer(self, origin: object) -> Tokenizer:
        """Return the vocabulary. Raise an InputError that names the folder `origin` if the model has no vocabulary."""
        if self.tokenizer is None:
            if self.kind == "tensorflow":
                raise InputError(
                    f"{origin} is invalid: it has no spiece.model, which text needs. Put the vocabulary of the model into the folder, or "
                    "into a copy of it."
                )
            raise InputError(
                f"{origin} is invalid: it was saved without a vocabulary, which text needs. From Python, "
                "xlpre.inference.context_losses.context_losses takes token ids instead of texts."
            )
        return self.tokenizer


def save_folder(path: str | Path, folder: ModelFolder, card: str | None = None) -> FileEntries:
    """Write a native model folder atomically, with the text `card` as its model card; an existing folder is replaced.

    Returns:
        Sizes and checksums of the files besides the card.
    """
    with atomic_dir(path) as partial:
        write_card(partial, card)
        return write_native_files(partial, folder)


def write_native_files(path: Path, folder: ModelFolder) -> FileEntries:
    """Write the files of a native model folder into the empty folder `path`. Return their sizes and checksums."""
    tokenizer = folder.tokenizer
    vocabulary = {tokenizer.file_name: write_bytes(path / tokenizer.file_name, tokenizer.content)} if tokenizer else {}
    return {
        **native_format.write_model(path, folder.config, folder.weights, folder.objective),
        **vocabulary,
        PROVENANCE_FILE: write_provenance(path, tokenizer, folder.provenance),
    }


def save_huggingface(path: str | Path, folder: ModelFolder, card: str | None = None) -> None:
    """Write a folder for transformers (`XLNetLMHeadModel`, `AutoModel`, `AutoTokenizer`) atomically, with a model card.

    `AutoModelForMaskedLM` opens permutation and denoising models with `trust_remote_code=True`, see modeling_masked_lm.py.

    Raises:
        InputError: a setting or a vocabulary that Hugging Face's XLNet cannot represent.
    """
    hf.check_expressible(folder.config)
    with export_folder(path, folder, card) as (partial, tokenizer):
        settings: dict[str, Any] = {}
        if OBJECTIVES[folder.objective].sees_ahead:
            shutil.copyfile(MASKED_LM_CODE, partial / MASKED_LM_CODE.name)
            settings["auto_map"] = {"AutoModelForMaskedLM": f"{MASKED_LM_CODE.stem}.XLNetForMaskedLM"}
            settings["pretraining_objective"] = folder.objective
        hf.write_model(partial, folder.config, folder.weights, folder.objective, settings)
        write_tokenizer(tokenizer, partial)


def save_tensorflow(path: str | Path, folder: ModelFolder, card: str | None = None) -> None:
    """Write a folder in the layout of the original TensorFlow release atomically, with a model card.

    Raises:
        InputError: a setting or a vocabulary that the original cannot represent.
    """
    tf.check_expressible(folder.config)
    with export_folder(path, folder, card) as (partial, tokenizer):
        tf.write_model(partial, folder.config, folder.weights)
        tokenizer.save(partial / "spiece.model")


@contextmanager
def export_folder(
    path: str | Path, folder: ModelFolder, card: str | None = None, **provenance: Any
) -> Iterator[tuple[Path, SentencePieceTokenizer]]:
    """Write a folder in another format atomically, with a provenance.json and the text `card` as its model card.

    The provenance holds the fields of `folder`, the fields given here, and the settings that the other format cannot store.

    Yields:
        Folder to write the files of the format into, and the vocabulary.

    Raises:
        InputError: the vocabulary is a table.
    """
    tokenizer = folder.require_tokenizer("the source folder")
    if not isinstance(tokenizer, SentencePieceTokenizer):
        raise InputError(
            f"a model with a vocabulary of {tokenizer.kind} is invalid for this format: XLNet has SentencePiece vocabularies only. Use the "
            "model folder of xlpre as it is."
        )
    with atomic_dir(path) as partial:
        yield partial, tokenizer
        settings = {"model": dataclasses.asdict(folder.config), "objective": folder.objective}
        write_provenance(partial, tokenizer, {**folder.provenance, **settings, **provenance})
        write_card(partial, card)


def write_card(path: Path, card: str | None) -> None:
    """Write the text of a model card into the folder `path`, unless it is None."""
    if card is not None:
        (path / CARD_FILE).write_text(card, encoding="utf-8")


def resolve_model_dir(path: str | Path) -> Path:
    """Return the model folder of a run, or `path` itself if it is not the folder of a run.

    The model folder of a run holds the weights of its latest checkpoint, or of the best seed of a fine-tuning run.

    Args:
        path: folder of a pretraining run, of a fine-tuning run, or of a model.

    Raises:
        InputError: the run has not saved a model yet.
    """
    path = Path(path)
    if (path / "config.json").exists() or tf.is_release(path):
        return path
    if (path / "model").is_dir():
        return path / "model"
    if (path / "config.yaml").exists():
        raise InputError(
            f"{path} is invalid: the run has not saved a model yet. Wait for it, or start it again if it was stopped."
        )
    return path


def load_folder(path: str | Path, allow_nonfinite: bool = False) -> ModelFolder:
    """Read a model folder of xlpre, Hugging Face or the TensorFlow release, or a Transformer-XL in one of its formats.

    Args:
        path: the model folder, the folder of a run, or the `model.pt` of a Transformer-XL.
        allow_nonfinite: accept NaN and infinity in the weights of a native folder.

    Raises:
        InputError: the folder is in another format; a file is missing or damaged; weights are not finite or have a wrong
            shape; or the vocabulary is not the one that the model was saved with.
    """
    path = resolve_model_dir(path)
    try:
        folder = _read(path)
        _check_consistent(path, folder)
        if not allow_nonfinite:
            check_finite(path, folder.weights)
        return folder
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{path} is invalid: its files do not fit together ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Copy the whole folder again. Nothing was loaded."
        ) from error


def load_init_from(path: str) -> ModelFolder:
    """Read the folder in the setting `init_from`; error messages name the setting."""
    try:
        return load_folder(path)
    except InputError as error:
        raise InputError(f"init_from: {error}") from None


def _read(path: Path) -> ModelFolder:
    if tf.is_release(path):
        return _read_tensorflow(path)
    if transformer_xl.is_saved_model(path):
        model = transformer_xl.read_saved_model(path, lambda folder: native_format.read_settings(folder, READABLE))
        return _transformer_xl_folder(*model)
    settings = native_format.read_settings(path, READABLE)
    if settings.get("format") == native_format.FORMAT:
        return _read_native(path, settings)
    if settings.get("model_type") == "xlnet":
        return _read_huggingface(path, settings)
    if settings.get("model_type") == transformer_xl.MODEL_TYPE:
        return _transformer_xl_folder(*transformer_xl.read_folder(path, settings))
    raise InputError(
        f"{path}/config.json is invalid: it must hold format {native_format.FORMAT!r}, or model_type 'xlnet' or "
        f"{transformer_xl.MODEL_TYPE!r}. Give {READABLE}."
    )


def _read_native(path: Path, settings: dict[str, Any]) -> ModelFolder:
    config, weights, objective = native_format.read_model(path, settings)
    provenance = read_provenance(path)
    if provenance is None:
        raise InputError(f"{path} is invalid: {PROVENANCE_FILE} is missing. Copy the whole folder.")
    has_vocabulary = provenance["vocabulary_sha256"] is not None
    tokenizer = _read_tokenizer(path, provenance, provenance["preprocess"]) if has_vocabulary else None
    return ModelFolder(config, weights, tokenizer, objective, provenance, "xlpre")


def _read_huggingface(path: Path, settings: dict[str, Any]) -> ModelFolder:
    provenance = read_provenance(path) or {}
    config, weights, objective = hf.read_model(path, settings)
    unmapped = [*hf.UNMAPPED]
    exported_mem_len, mem_len = provenance.get("model", {}).get("mem_len", 0), settings.get("mem_len") or 0
    if mem_len != exported_mem_len:  # config.json was changed after the export
        unmapped.remove("mem_len")
    config, objective = _with_unmapped(provenance, config, objective, unmapped)
    preprocess = provenance["preprocess"] if provenance else read_preprocess(path)
    tokenizer = _read_tokenizer(path, provenance, preprocess)
    return ModelFolder(config, weights, tokenizer, objective, provenance, "huggingface")


def _read_tensorflow(path: Path) -> ModelFolder:
    provenance = read_provenance(path) or {}
    config, weights = tf.read_model(path)
    config, objective = _with_unmapped(provenance, config, "permutation", tf.UNMAPPED)
    has_vocabulary = provenance or (path / "spiece.model").exists()
    tokenizer = _read_tokenizer(path, provenance, provenance.get("preprocess", "cased")) if has_vocabulary else None
    return ModelFolder(config, weights, tokenizer, objective, provenance, "tensorflow")


def _transformer_xl_folder(config: ModelConfig, weights: dict[str, Tensor]) -> ModelFolder:
    return ModelFolder(config, weights, None, "causal", {CONVERTED_FROM: "transformer-xl"}, "transformer-xl")


def _with_unmapped(
    provenance: Mapping[str, Any], config: ModelConfig, objective: str, unmapped: Sequence[str]
) -> tuple[ModelConfig, str]:
    """Return config and objective. Settings that the other format does not store (`unmapped`) are read from the provenance."""
    if not (model := provenance.get("model")):
        return config, objective
    return dataclasses.replace(config, **{key: model[key] for key in unmapped}), provenance["objective"]


def _read_tokenizer(path: Path, provenance: Mapping[str, Any], preprocess: Preprocess) -> Tokenizer:
    """Read the vocabulary of a folder, and check it against the provenance if there is any."""
    table = path / TableTokenizer.file_name
    if provenance.get("vocabulary_kind", SentencePieceTokenizer.kind) != SentencePieceTokenizer.kind:
        if not table.exists():
            raise InputError(f"{table} does not exist. Copy the whole folder again.")
        tokenizer: Tokenizer = load_tokenizer(table, preprocess)
    else:
        tokenizer = SentencePieceTokenizer(
            read_vocabulary(path), str(path / SentencePieceTokenizer.file_name), preprocess
        )
    if provenance:
        check_vocabulary(path, provenance, tokenizer)
    return tokenizer


def _check_consistent(path: Path, folder: ModelFolder) -> None:
    """Raise InputError unless objective, weights, vocabulary and config agree."""
    if folder.objective not in OBJECTIVES:
        raise InputError(
            f"{path}: objective={folder.objective!r} is invalid: it must be one of {', '.join(OBJECTIVES)}. "
            "Copy the whole folder again."
        )
    expected = dict(meta_model(folder.config, two_streams=True, next_sentence=folder.next_sentence).named_parameters())
    if differing := expected.keys() ^ folder.weights.keys():
        name = min(differing)
        problem = "is missing from the weights" if name in expected else "is not in the model that the config describes"
        raise InputError(f"{path} is invalid: {name} {problem}. Copy the whole folder again.")
    for name, parameter in expected.items():
        if parameter.shape != folder.weights[name].shape:
            raise InputError(
                f"{path} is invalid: {name} has the shape {tuple(folder.weights[name].shape)}, but the config requires "
                f"{tuple(parameter.shape)}. Copy the whole folder again."
            )
    if folder.tokenizer and len(folder.tokenizer) != folder.config.vocab_size:
        file_name = folder.tokenizer.file_name
        n_pieces, n_rows = len(folder.tokenizer), folder.config.clusters[-1][1]
        resize = f"; or, if tokens were added to the model, remove them with resize_token_embeddings({n_pieces})"
        raise InputError(
            f"{path} is invalid: {file_name} has {n_pieces} pieces, but the model was built for {n_rows}. Put its {file_name} there"
            f"{resize if n_rows > n_pieces else ''}."
        )
