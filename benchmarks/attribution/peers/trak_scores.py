"""The package `traker`: TRAK by its authors."""

import logging
import tempfile

import torch
from job import Job, Scores, main
from trak import TRAKer
from trak.projectors import BasicProjector, ProjectionType

PROJECTIONS = (32, 128, 512)


def trak(job: Job, checkpoints: list[dict]) -> Scores:
    """Run TRAK with several numbers of projections, in float32 on the processor."""
    size = sum(value.numel() for value in job.net.parameters())
    for dim in [dim for dim in PROJECTIONS if dim <= max(PROJECTIONS[0], len(job.X) // 2)]:
        with tempfile.TemporaryDirectory() as folder:
            # two blocks: a single one is freed after the training samples, and traker 0.3.2 does not draw it again
            projector = BasicProjector(size, dim, 0, ProjectionType.rademacher, device="cpu", block_size=dim // 2)
            traker = TRAKer(
                job.net, "image_classification", len(job.X), folder, device="cpu", projector=projector, proj_dim=dim,
                use_half_precision=False, logging_level=logging.WARNING,
            )  # fmt: skip
            for number, checkpoint in enumerate(checkpoints):
                traker.load_checkpoint(checkpoint, model_id=number)
                for X, y in job.train_loader():
                    traker.featurize((X, y), num_samples=len(X))
            traker.finalize_features()
            for number, checkpoint in enumerate(checkpoints):
                traker.start_scoring_checkpoint("test", checkpoint, number, num_targets=len(job.X_test))
                for X, y in job.test_loader():
                    traker.score((X, y), num_samples=len(X))
            yield f"{dim} projections", torch.as_tensor(traker.finalize_scores("test")).T.clone()


if __name__ == "__main__":
    main({"TRAK-1": lambda job: trak(job, [job.final]), "TRAK-10": lambda job: trak(job, list(job.halves))})
