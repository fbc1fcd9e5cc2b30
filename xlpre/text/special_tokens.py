"""The special symbols of XLNet's vocabulary and their fixed ids (zihangdai/xlnet data_utils.py)."""

UNK, BOS, EOS, CLS, SEP, PAD, MASK, EOD, EOP = range(9)

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
CONTROL = SPECIAL_TOKENS[CLS:EOP]  # never produced from text
USER_DEFINED = (SPECIAL_TOKENS[EOP], ".", "(", ")", '"', "-", "–", "£", "€")  # always a piece of their own

WORD_BOUNDARY = "▁"  # SentencePiece's mark of a space before a piece
