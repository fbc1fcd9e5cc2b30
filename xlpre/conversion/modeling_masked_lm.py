"""XLNet as a masked language model, for Hugging Face's `AutoModelForMaskedLM` with `trust_remote_code=True`.

transformers has no such class, because XLNet predicts tokens in its query stream. Programs that mask tokens and read the logits at
`<mask>`, such as evaluations by pseudo-log-likelihood (Salazar et al. 2020, arXiv:1910.14659), need one. xlpre writes this file into the
folders that it exports; it needs only torch and transformers.
"""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import XLNetConfig, XLNetLMHeadModel, XLNetModel
from transformers.modeling_outputs import MaskedLMOutput

CLS, PAD, MASK = 3, 5, 6  # token ids
SEGMENT_CLS, SEGMENT_PAD = 2, 3


class XLNetModelInOneDtype(XLNetModel):
    """XLNet whose position encodings have the dtype of the weights. Without it, two streams fail in half precision."""

    def relative_positional_encoding(self, *args: object, **kwargs: object) -> Tensor:
        """Compute the position encodings, see XLNetModel."""
        return super().relative_positional_encoding(*args, **kwargs).to(self.word_embedding.weight.dtype)


class XLNetForMaskedLM(XLNetLMHeadModel):
    """XLNet that predicts the `<mask>` tokens of its input.

    `config.pretraining_objective` is `permutation` or `denoising`. A permutation model predicts each `<mask>` in its query stream, from all
    tokens that are not `<mask>`. A denoising model reads `<mask>` as an ordinary token, as BERT does.
    """

    def __init__(self, config: XLNetConfig) -> None:
        super().__init__(config)
        self.transformer = XLNetModelInOneDtype(config)
        # XLNetModel creates some weights in fp32, whatever `dtype` is
        torch.nn.Module.to(self, torch.get_default_dtype())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: object,
    ) -> MaskedLMOutput:
        """Compute logits for all positions; they predict the token there only where the input is `<mask>`.

        Args:
            input_ids: (B, T) token ids; a text ends with `<sep> <cls>`, as the tokenizer writes it.
            attention_mask: (B, T), 0 for padding.
            token_type_ids: (B, T) segments; None: those of the tokenizer for a single text.
            labels: (B, T) tokens to predict; -100 for positions without loss.
            **kwargs: more arguments of XLNetLMHeadModel.

        Returns:
            Logits (B, T, V), and the mean loss over the labels if there are any.
        """
        if token_type_ids is None:
            token_type_ids = (input_ids == CLS) * SEGMENT_CLS + (input_ids == PAD) * SEGMENT_PAD
        inputs = {"attention_mask": attention_mask, "token_type_ids": token_type_ids, "use_mems": False, **kwargs}
        if self.config.pretraining_objective == "permutation":
            n_tokens, dtype = input_ids.size(1), self.transformer.word_embedding.weight.dtype
            hidden = (input_ids == MASK)[:, None, :].expand(-1, n_tokens, -1)
            inputs["perm_mask"] = hidden.to(dtype)
            inputs["target_mapping"] = torch.eye(n_tokens, dtype=dtype, device=input_ids.device).expand_as(hidden)
        inputs["return_dict"] = True
        output = super().forward(input_ids, **inputs)
        loss = None if labels is None else cross_entropy(output.logits.flatten(0, 1), labels.flatten())
        return MaskedLMOutput(
            loss=loss, logits=output.logits, hidden_states=output.hidden_states, attentions=output.attentions
        )
