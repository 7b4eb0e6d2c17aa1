import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import springline

data = [{"input_ids": row, "labels": row} for row in torch.randint(16, (32, 8))]
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2))
args = TrainingArguments("output", max_steps=4, report_to=[], use_cpu=True)
