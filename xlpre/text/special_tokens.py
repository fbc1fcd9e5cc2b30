"""The special symbols of XLNet's vocabulary and their fixed ids (zihangdai/xlnet data_utils.py)."""

UNK, BOS, EOS, CLS, SEP, PAD, MASK, EOD, EOP = range(9)

PIECES = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
CONTROL = PIECES[CLS:EOP]  # never produced from text
USER_DEFINED = (PIECES[EOP], ".", "(", ")", '"', "-", "–", "£", "€")  # always a piece of their own

SPACE = "▁"  # SentencePiece's mark of a space before a piece
