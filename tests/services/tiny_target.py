"""Makes a tiny random target, run in the trainer's environment: `tiny_target.py FOLDER`."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=2,
)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
