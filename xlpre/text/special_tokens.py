"""Special tokens of XLNet's vocabulary and their ids (zihangdai/xlnet data_utils.py)."""

UNK, BOS, EOS, CLS, SEP, PAD, MASK, EOD, EOP = range(9)

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>")
N_SPECIAL = len(SPECIAL_TOKENS)  # all other tokens have larger ids
N_SYMBOLS = 2  # <sep> and <cls>, which follow a text
CONTROL_SYMBOLS = SPECIAL_TOKENS[CLS:EOP]  # text never produces them
USER_DEFINED_SYMBOLS = (SPECIAL_TOKENS[EOP], ".", "(", ")", '"', "-", "–", "£", "€")  # always pieces of their own

NEWLINE_PIECE = "<0x0A>"  # a newline, in vocabularies that have one
WORD_BOUNDARY = "▁"  # SentencePiece's mark for a space before a piece
