"""quanda's ClassDetectionMetric of scores that others computed. Usage: python quanda_metrics.py _ JOB.pt OUT.pt."""

import sys

import torch
from job import define_operators
from torch import nn
from torch.utils.data import TensorDataset

define_operators()
from quanda.metrics.downstream_eval import ClassDetectionMetric  # noqa: E402

_, _, file, out = sys.argv
job = torch.load(file, weights_only=True)
data = TensorDataset(job["X"], job["y"])
values = {}
for name, scores in job["scores"].items():
    metric = ClassDetectionMetric(nn.Linear(1, 1), data, s=5)  # it uses the network only to filter by predictions
    metric.update(explanations=scores, test_targets=job["y_test"][: len(scores)])
    values[name] = float(metric.compute()["score"])
torch.save({"class detection": values}, out)
