import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification

import epk_gp as epk

torch.manual_seed(0)
ids = torch.randint(5, 40, (24, 8))
labels = (ids == 7).any(dim=1).long()
encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
config = BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
)
pretrained = BertForSequenceClassification(config).double()
lora = LoraConfig(
    task_type=TaskType.SEQ_CLS,
    r=2,
    lora_alpha=4,
    lora_dropout=0.1,
    target_modules=["query", "value"],
)
net = get_peft_model(pretrained, lora)
net.print_trainable_parameters()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
with epk.Recorder(  # recorder
    net, optimizer, encoded, labels, output=lambda returned: returned.logits
) as recorder:
    net.train()
    for epoch in range(2):
        for rows in torch.randperm(len(ids)).split(8):
            batch = {name: value[rows] for name, value in encoded.items()}
            outputs = net(**batch)
            loss = F.cross_entropy(outputs.logits, labels[rows])
            loss.backward()
            recorder.batch(rows)  # recorder
            optimizer.step()
            optimizer.zero_grad()
X_test = {name: value[:2] for name, value in encoded.items()}
