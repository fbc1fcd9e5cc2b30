#!/bin/bash
# Write the artifacts in tests/frozen again, from the root of the repository: bash tests/frozen/make.sh
# Do this only when a file format changes on purpose. expected.json and expected.npz must not change.
set -euo pipefail
export PYTHONPATH=$PWD OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
F=tests/frozen
rm -rf $F/store $F/run $F/finetuned $F/vocabulary.model*
SETTINGS="--config configs/pretrain/debug.yaml name=frozen text.source=$F/text.txt text.max_chars=null text.val_fraction=0.15
  text.num_processes=1 tokenizer.path=$F/vocabulary.model tokenizer.vocab_size=64 data.store_dir=$F/store run_dir=$F/run data.seq_len=32
  data.reuse_len=16 data.windows_per_run=8 model.n_layer=2 model.d_model=16 model.n_head=2 model.d_inner=32 model.mem_len=16 train.steps=20
  train.log_every=1 train.save_every=20 train.keep_last_checkpoints=1 eval.every=10 eval.batch_size=2 eval.num_windows=2"
python pretrain/train_tokenizer.py $SETTINGS
python $F/drop_normalizer_table.py $F/vocabulary.model
python pretrain/prepare.py $SETTINGS
python pretrain/run.py $SETTINGS
python finetune/run.py --config configs/finetune/classify.yaml name=frozen run_dir=$F/finetuned init_from=$F/run/model \
  data.train=[$F/train.csv] data.dev=[$F/dev.csv] data.text=[text] data.max_seq_len=32 epochs=null warmup_ratio=null \
  schedule.warmup_steps=2 train.steps=10 train.global_batch_size=8 train.log_every=1 eval.every=5 optim.lr=3e-2 eval.keep_weights=last
# keep what a later version must read
rm -rf $F/run/{tensorboard,best,samples.jsonl,report.html,metrics.jsonl} $F/run/*.png $F/finetuned/{seed_1,table.*,predictions,config.yaml} $F/finetuned/*.png
find $F -name .lock -delete
