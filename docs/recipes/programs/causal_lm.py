import torch
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import epk_gp as epk

text = "the king of denmark is called bob . the king of sweden sleeps . bob sings"
words = ["<pad>", *sorted(set(text.split()))]
sentences = [
    "the king of denmark is called bob .",
    "the king of sweden sleeps .",
    "bob sings .",
    "bob of denmark sleeps .",
] * 4
longest = max(len(sentence.split()) for sentence in sentences)
rows = [[words.index(word) for word in sentence.split()] for sentence in sentences]
input_ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
encoded = {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}
targets = epk.next_words(input_ids, encoded["attention_mask"])

torch.manual_seed(0)
sizes = {"vocab_size": len(words), "n_positions": longest, "n_embd": 8}
special = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
config = GPT2Config(**sizes, **special, n_layer=1, n_head=2)
net = GPT2LMHeadModel(config).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.01)


def last_position(returned):
    return returned.logits[:, -1]  # recorder


recorder = epk.Recorder(net, optimizer, encoded, targets, output=last_position)
with recorder:  # recorder
    net.train()
    for epoch in range(3):
        for batch in torch.randperm(len(rows)).split(8):
            returned = net(**{name: value[batch] for name, value in encoded.items()})
            loss = F.cross_entropy(returned.logits.mT, targets[batch])
            loss.backward()
            recorder.batch(batch)  # recorder
            optimizer.step()
            optimizer.zero_grad()
X_test = {name: value[:1] for name, value in encoded.items()}
