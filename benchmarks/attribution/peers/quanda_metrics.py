"""quanda's ClassDetectionMetric of scores that others computed. Usage: python quanda_metrics.py _ JOB.pt OUT.pt."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

# torchvision on PyPI holds CUDA code and does not load beside a torch without it; then it fails at the two operators
# that it registers without having them. Nothing here calls them.
if not torch.version.cuda:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
from quanda.metrics.downstream_eval import ClassDetectionMetric

_, _, file, out = sys.argv
job = torch.load(file, weights_only=True)
data = TensorDataset(job["X"], job["y"])
values = {}
for name, scores in job["scores"].items():
    metric = ClassDetectionMetric(nn.Linear(1, 1), data, s=5)  # it uses the network only to filter by predictions
    metric.update(explanations=scores, test_targets=job["y_test"][: len(scores)])
    values[name] = float(metric.compute()["score"])
torch.save({"class detection": values}, out)
