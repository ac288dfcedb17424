#!/bin/sh
# llama-2-7b (float16) on 3 x ml.g5.2xlarge, 1 copy of TP 1 each, 74 sequences per copy, requests up to 2,560 tokens
# recommended for 4 req/s, Poisson, cost; profile TGI 1.x (2023), fitted TODAY on 2 levels of llama-2-7b on ml.g5.2xlarge (measured); 4 requests of 2,560 tokens always fit in a copy, 74 of 128 + 64 tokens are expected to (vLLM 0.12 to 0.19, 90% of the memory)
# one copy; each further one needs its own CUDA_VISIBLE_DEVICES and --port
exec vllm serve meta-llama/Llama-2-7b-hf \
  --tensor-parallel-size 1 \
  --max-num-seqs 74 \
  --max-model-len 2560 \
  --dtype auto \
  --max-num-batched-tokens 2048 \
  --gpu-memory-utilization 0.9
