"""Remove the Unicode normalization table (240 kB) from a vocabulary of ASCII text."""

import sys
from pathlib import Path

from sentencepiece import sentencepiece_model_pb2

path = Path(sys.argv[1])
proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
proto.normalizer_spec.name, proto.normalizer_spec.precompiled_charsmap = "identity", b""
path.write_bytes(proto.SerializeToString())
