#!/bin/sh
# llama-2-7b (float16) on 3 x ml.g5.2xlarge, 1 copy of TP 1 each, 76 sequences per copy, requests up to 192 tokens
# recommended for 4 req/s, Poisson, cost; profile TGI 1.x (2023), fitted TODAY on 2 levels of llama-2-7b on ml.g5.2xlarge (measured)
exec vllm \
  serve \
  meta-llama/Llama-2-7b-hf \
  --tensor-parallel-size \
  1 \
  --max-num-seqs \
  76 \
  --max-model-len \
  192 \
  --dtype \
  float16
