"""pytorch-ood's detectors, in an environment of their own: they read what a network computed, and write scores.

Usage: python detectors.py IN.pt OUT.pt. Larger scores are for points that are more likely unknown.
"""

import sys
import time
from importlib.metadata import version

import torch
from pytorch_ood.detector import KNN, EnergyBased, Mahalanobis, MaxLogit, MaxSoftmax

NEIGHBOURS = 50  # OpenOOD's default


def main() -> None:
    """Fit each detector on the training images' features, and score the asked ones."""
    torch.set_num_threads(1)
    job = torch.load(sys.argv[1], weights_only=True)
    train, labels, features, logits = (job[name] for name in ("features", "labels", "asked_features", "asked_logits"))
    k = min(NEIGHBOURS, len(train))
    methods = {
        "MSP": lambda: MaxSoftmax(None).predict_logits(logits),
        "max logit": lambda: MaxLogit(None).predict_logits(logits),
        "energy": lambda: EnergyBased(None).predict_logits(logits),
        "Mahalanobis": lambda: Mahalanobis(None).fit_features(train, labels).predict_features(features),
        "kNN, features": lambda: KNN(None, k).fit_features(train, labels).predict_features(features),
        "kNN, pixels": lambda: KNN(None, k).fit_features(job["pixels"], labels).predict_features(job["asked_pixels"]),
    }
    scores, seconds = {}, {}
    for name, method in methods.items():
        start = time.process_time()
        scores[name] = method().double()
        seconds[name] = time.process_time() - start
    torch.save({"scores": scores, "seconds": seconds, "versions": {"pytorch-ood": version("pytorch-ood")}}, sys.argv[2])


if __name__ == "__main__":
    main()
