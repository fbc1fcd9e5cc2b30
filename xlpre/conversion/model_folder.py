"""The model folder: weights in safetensors, config, vocabulary, passport. Nothing in it is ever unpickled.

model.safetensors   fp32 weights by their names in xlpre/model; the head of next-sentence prediction among them, if it was learned
config.json         `model`: ModelConfig, `objective`: its name, and a checksum of the weights
spiece.model        the SentencePiece vocabulary
provenance.json       vocabulary hash, special ids, data fingerprint, step, revision, versions

`load_folder` also reads a folder of Hugging Face's XLNet and one of the original TensorFlow release, told apart on sight;
`save_huggingface` and `save_release` write them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from xlpre.common.files import new_folder
from xlpre.common.safetensors_io import check_finite
from xlpre.conversion import hf, native, provenance, tf
from xlpre.conversion.hf_tokenizer import read_preprocess, read_vocabulary, write_tokenizer
from xlpre.model.backbone import Backbone
from xlpre.model.config import ModelConfig
from xlpre.model.initialization import build_with_weights
from xlpre.model.language_model import LanguageModel, meta_model
from xlpre.objectives.registry import OBJECTIVES
from xlpre.text.preprocess import Preprocess
from xlpre.text.tokenizer import Tokenizer

KINDS = f"a model folder of xlpre (config.json), a folder of Hugging Face's XLNet (config.json), or a TensorFlow release ({tf.CONFIG})"


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds.

    Attributes:
        config: the shape of the model.
        weights: fp32, by their names in xlpre/model.
        tokenizer: the vocabulary; None if the folder has none. How text is preprocessed for it is known from a passport only,
            and else taken to be as published.
        objective: the name of what it was trained on.
        facts: its passport; empty if it has none.
        kind: `xlpre`, `huggingface` or `tensorflow`.
    """

    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer | None
    objective: str
    facts: dict[str, Any]
    kind: str

    @property
    def next_sentence(self) -> bool:
        """Whether there is a head of next-sentence prediction, which its weights say."""
        return any(name.startswith("auxiliary.next_sentence.") for name in self.weights)

    def model(self) -> LanguageModel:
        """The language model, ready to evaluate."""
        two_streams = OBJECTIVES[self.objective].two_streams
        return build_with_weights(
            self.weights, lambda: LanguageModel(self.config, two_streams, self.next_sentence)
        ).eval()

    def reader(self) -> Backbone:
        """The backbone as fine-tuning reads with it, ready to evaluate: its hidden states are those of the content stream."""
        return build_with_weights(self.weights, lambda: LanguageModel(self.config, two_streams=False)).eval().backbone

    def vocabulary(self, origin: object) -> Tokenizer:
        """The vocabulary; ValueError naming `origin`, the folder, if it has none."""
        if self.tokenizer is None:
            raise ValueError(f"{origin} has no spiece.model; put the vocabulary of its model there (or into a copy)")
        return self.tokenizer


def save_folder(path: str | Path, folder: ModelFolder) -> None:
    """Write our own model folder, whole or not at all; one that is there is replaced."""
    with new_folder(path) as partial:
        write_files(partial, folder)


def write_files(path: Path, folder: ModelFolder) -> None:
    """Write the files of our own model folder into `path`, an empty one."""
    tokenizer = folder.vocabulary("the folder that the model was read from")
    native.write_model(path, folder.config, folder.weights, folder.objective)
    tokenizer.save(path / "spiece.model")
    provenance.write(path, tokenizer, folder.facts)


def save_huggingface(path: str | Path, folder: ModelFolder) -> None:
    """Write a folder that transformers opens (`XLNetLMHeadModel`, `AutoModel`, `AutoTokenizer`), whole or not at all.

    Raises:
        ValueError: something that Hugging Face cannot express, by the name of its key.
    """
    hf.check_expressible(folder.config)
    with export_folder(path, folder) as (partial, tokenizer):
        hf.write_model(partial, folder.config, folder.weights, folder.objective)
        write_tokenizer(tokenizer, partial)
        native.as_readable_as_the_rest(partial / "model.safetensors")


def save_release(path: str | Path, folder: ModelFolder) -> None:
    """Write a folder as the original's TensorFlow release is laid out, whole or not at all.

    Raises:
        ValueError: something that the original cannot express, by the name of its key.
    """
    tf.check_expressible(folder.config)
    with export_folder(path, folder) as (partial, tokenizer):
        tf.write_release(partial, folder.config, folder.weights)
        tokenizer.save(partial / "spiece.model")


@contextmanager
def export_folder(path: str | Path, folder: ModelFolder, **facts: Any) -> Iterator[tuple[Path, Tokenizer]]:
    """Yield a folder for a model in another's format, and its vocabulary, both to be written, whole or not at all.

    A passport is put beside them: that of `folder`, `facts`, and what the format has no word for.
    """
    tokenizer = folder.vocabulary("the folder that the model was read from")
    with new_folder(path) as partial:
        yield partial, tokenizer
        said = {"model": dataclasses.asdict(folder.config), "objective": folder.objective}
        provenance.write(partial, tokenizer, {**folder.facts, **said, **facts})


def load_folder(path: str | Path, spoilt: bool = False) -> ModelFolder:
    """Read a folder of any of the three kinds.

    Args:
        path: the folder.
        spoilt: weights that are not finite are what is looked for: one of ours that has them is read, too.

    Raises:
        ValueError: none of the three, a file missing or damaged, weights that are not finite or of another shape, another
            vocabulary than it was saved with.
    """
    path = Path(path)
    try:
        folder = _checked(path, _read(path))
        if not spoilt:
            check_finite(path, folder.weights)
        return folder
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"{path}: its files do not fit together ({type(error).__name__}: {str(error).splitlines()[0]}); nothing was loaded"
        ) from None


def load_init(path: str) -> ModelFolder:
    """Read the folder that the setting `init` names, which messages name, too."""
    try:
        return load_folder(path)
    except ValueError as error:
        raise ValueError(f"init: {error}") from None


def _read(path: Path) -> ModelFolder:
    if tf.is_release(path):
        return _release(path)
    settings = native.read_settings(path, KINDS)
    if settings.get("format") == native.FORMAT:
        return _ours(path, settings)
    if settings.get("model_type") == "xlnet":
        return _huggingface(path, settings)
    raise ValueError(
        f"{path}/config.json: neither format {native.FORMAT!r} nor model_type 'xlnet' in it; what can be read is {KINDS}"
    )


def _ours(path: Path, settings: dict[str, Any]) -> ModelFolder:
    facts = provenance.read(path)
    if facts is None:
        raise ValueError(f"{path}: {provenance.FILE} is missing; copy the whole folder")
    tokenizer = _vocabulary(path, facts, facts["preprocess"])
    config, weights, objective = native.read_model(path, settings)
    return ModelFolder(config, weights, tokenizer, objective, facts, "xlpre")


def _huggingface(path: Path, settings: dict[str, Any]) -> ModelFolder:
    facts = provenance.read(path) or {}
    config, weights, objective = hf.read_model(path, settings)
    config, objective = _said(facts, config, objective, hf.UNSAID)
    tokenizer = _vocabulary(path, facts, facts["preprocess"] if facts else read_preprocess(path))
    return ModelFolder(config, weights, tokenizer, objective, facts, "huggingface")


def _release(path: Path) -> ModelFolder:
    facts = provenance.read(path) or {}
    config, weights = tf.read_release(path)
    config, objective = _said(facts, config, "permutation", tf.UNSAID)
    known = facts or (path / "spiece.model").exists()
    tokenizer = _vocabulary(path, facts, facts.get("preprocess", "cased")) if known else None
    return ModelFolder(config, weights, tokenizer, objective, facts, "tensorflow")


def _said(
    facts: Mapping[str, Any], config: ModelConfig, objective: str, unsaid: Sequence[str]
) -> tuple[ModelConfig, str]:
    """Shape and objective of a model in another's format, with what a passport of ours says where the format has no word (`unsaid`)."""
    if not (was := facts.get("model")):
        return config, objective
    return dataclasses.replace(config, **{key: was[key] for key in unsaid}), facts["objective"]


def _vocabulary(path: Path, facts: Mapping[str, Any], preprocess: Preprocess) -> Tokenizer:
    """That of the folder `path`, which must be the one its passport knows, if it has one."""
    tokenizer = Tokenizer(read_vocabulary(path), str(path / "spiece.model"), preprocess)
    if facts:
        provenance.check_vocabulary(path, facts, tokenizer)
    return tokenizer


def _checked(path: Path, folder: ModelFolder) -> ModelFolder:
    """Raise ValueError unless weights, vocabulary and shape agree."""
    if folder.objective not in OBJECTIVES:
        raise ValueError(f"{path}: objective {folder.objective!r} is none of {', '.join(OBJECTIVES)}")
    expected = dict(meta_model(folder.config, two_streams=True, next_sentence=folder.next_sentence).named_parameters())
    if odd := expected.keys() ^ folder.weights.keys():
        side = (
            "missing from the weights" if sorted(odd)[0] in expected else "not in the model that the config describes"
        )
        raise ValueError(f"{path}: {sorted(odd)[0]} is {side}")
    for name, parameter in expected.items():
        if parameter.shape != folder.weights[name].shape:
            raise ValueError(
                f"{path}: {name} is {tuple(folder.weights[name].shape)}, the config says {tuple(parameter.shape)}"
            )
    if folder.tokenizer and len(folder.tokenizer) != folder.config.vocab_size:
        n_pieces, n_rows = len(folder.tokenizer), folder.config.vocab_size
        raise ValueError(
            f"{path}: spiece.model has {n_pieces} pieces, the model {n_rows}; put the model's own there"
            + (
                f", or, if tokens were added to the model, take them out: resize_token_embeddings({n_pieces})"
                * (n_rows > n_pieces)
            )
        )
    return folder
