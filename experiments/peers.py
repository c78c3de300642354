"""Methods that say how sure a trained network is: softmax, energy, ensembles, Gaussian processes, distances."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from sklearn.covariance import ledoit_wolf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.analysis.measures import error_detection
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import Dataset
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from rbf_process import fit_rbf_process, median_distance
from uncertainty_problems import Judged, Problem, network_of, train_unrecorded

NUM_NEIGHBOURS = (1, 3, 10, 30, 100)
MAX_EXACT = 5000  # points on which an RBF-GP is conditioned; of more, so many are drawn
MEMBERS = 5
NUM_SAMPLES = 256
GP_SUBSET = {"last_layer": 1000, "all": 500}  # points of laplace-torch's functional process
PRIOR_PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)


@dataclass(frozen=True)
class Judgement:
    """What a method says about n images.

    Attributes:
        error: (n,), larger where the network's own prediction is less sure to be right.
        outside: By name, (n,), larger for images from elsewhere. The first one is the method's main score.
        probability: (n, C), its own prediction, where it makes one.
    """

    error: Tensor
    outside: dict[str, Tensor]
    probability: Tensor | None = None


Judge = Callable[[Tensor], Judgement]
Peer = Callable[[Judged], Judge]  # it learns from training and validation data, and then judges images


def logits(judged: Judged, X: Tensor) -> Tensor:
    """Return the trained network's outputs, in float64."""
    return network_outputs(judged.trajectory, X, head="logits").double()


def training_data(judged: Judged) -> Dataset:
    """Return the images and labels that the network was trained on."""
    run = judged.trajectory
    return Dataset(run.inputs, run.targets, run.num_outputs, judged.problem.data)


def hidden(judged: Judged) -> Callable[[Tensor], Tensor]:
    """Return the function that computes what enters the last layer."""
    layers = nn.Sequential(*list(network_of(judged).children())[:-1])
    return lambda X: torch.cat([layers(part).flatten(1) for part in X.split(1000)]).double()


def pixels(_: Judged) -> Callable[[Tensor], Tensor]:
    """Return the function that lists the pixels."""
    return lambda X: X.flatten(1).double()


def chosen_factors(parts: list[Tensor], labels: Tensor) -> list[float]:
    """Choose a > 0 in softmax(sum_i a_i parts_i) by the likelihood of held-out labels."""
    stacked = torch.stack(parts).double()
    raw = torch.full((len(parts),), -float(torch.tensor(len(parts)).log()), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([raw], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(torch.einsum("i,inc->nc", raw.exp(), stacked), labels)
        value.backward()
        return value

    optimizer.step(loss)
    return raw.detach().exp().tolist()


def _judgement(p: Tensor, predicted: Tensor, **scores: Tensor) -> Judgement:
    """Judge by class probabilities: by that of the network's class, and by their entropy."""
    entropy = torch.special.entr(p).sum(1)
    return Judgement(1 - p.gather(1, predicted[:, None])[:, 0], {"entropy": entropy} | scores, p)


def _information(p: Tensor) -> Tensor:
    """Return the mutual information of probabilities (samples, n, C)."""
    return torch.special.entr(p.mean(0)).sum(1) - torch.special.entr(p).sum(2).mean(0)


# The network itself


def as_trained(judged: Judged) -> Judge:
    """Judge by the softmax of the network."""

    def judge(X: Tensor) -> Judgement:
        z = logits(judged, X)
        return _judgement(z.softmax(1), z.argmax(1))

    return judge


def softmax(judged: Judged) -> Judge:
    """Judge by the softmax of the network at a temperature chosen on validation data (Guo et al. 2017)."""
    (a,) = chosen_factors([logits(judged, judged.validation.inputs)], judged.validation.labels)

    def judge(X: Tensor) -> Judgement:
        z = logits(judged, X)
        return _judgement((a * z).softmax(1), z.argmax(1))

    return judge


def energy(judged: Judged) -> Judge:
    """Judge by the free energy of the logits (Liu et al. 2020)."""

    def judge(X: Tensor) -> Judgement:
        value = -logits(judged, X).logsumexp(1)
        return Judgement(value, {"energy": value})

    return judge


# Ensembles and Laplace


def ensemble_members(judged: Judged) -> list[nn.Module]:
    """Return the network and four more that were trained like it, from other weights and in another order."""
    problem, train = judged.problem, training_data(judged)
    seeds = (1000 * problem.seed + 1000 + k for k in range(1, MEMBERS))
    return [network_of(judged), *(train_unrecorded(replace(problem, seed=seed), train) for seed in seeds)]


def ensemble(judged: Judged) -> Judge:
    """Judge by five networks (Lakshminarayanan et al. 2017), their mean tempered on validation data."""
    members = ensemble_members(judged)

    def votes(X: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([net(X).double().softmax(1) for net in members])

    return _sampled(judged, votes)


def _sampled(judged: Judged, samples: Callable[[Tensor], Tensor]) -> Judge:
    """Judge by samples (samples, n, C) of class probabilities, their mean tempered on validation data."""
    validation = judged.validation
    (a,) = chosen_factors([_log(_mean_of(samples, validation.inputs)[0])], validation.labels)

    def judge(X: Tensor) -> Judgement:
        mean, information = _mean_of(samples, X)
        p = (a * _log(mean)).softmax(1)
        return _judgement(p, logits(judged, X).argmax(1), **{"mutual information": information})

    return judge


def _mean_of(samples: Callable[[Tensor], Tensor], X: Tensor) -> tuple[Tensor, Tensor]:
    parts = [samples(part) for part in X.split(200)]
    return torch.cat([p.mean(0) for p in parts]), torch.cat([_information(p) for p in parts])


def _log(p: Tensor) -> Tensor:
    return p.clamp_min(1e-30).log()


def laplace_last_layer(judged: Judged) -> Judge:
    """Judge by laplace-torch's default: Kronecker-factored, last layer, prior precision by marginal likelihood."""
    from laplace import Laplace  # noqa: PLC0415  an optional peer

    model = Laplace(
        network_of(judged).requires_grad_(), "classification", subset_of_weights="last_layer", hessian_structure="kron"
    )
    torch.manual_seed(judged.problem.seed)
    model.fit(_loader(training_data(judged)))
    model.optimize_prior_precision(pred_type="glm", method="marglik", link_approx="mc")
    return _sampled(
        judged, lambda X: model.predictive_samples(X, pred_type="glm", n_samples=NUM_SAMPLES).detach().double()
    )


def laplace_process(weights: str) -> Peer:
    """Judge by laplace-torch's functional process (Immer et al. 2021), prior precision by validation likelihood.

    It computes the Jacobians of the points that it is conditioned on again for every batch: of a part of them, and of
    all weights in float32. Prior precisions at which its variances are not positive are left out.
    """
    dtype = torch.float32 if weights == "all" else torch.float64

    def fit(judged: Judged) -> Judge:
        from laplace import Laplace  # noqa: PLC0415  an optional peer

        train, validation = training_data(judged), judged.validation
        model = Laplace(
            network_of(judged).to(dtype).requires_grad_(),
            "classification",
            subset_of_weights=weights,
            hessian_structure="gp",
            n_subset=min(GP_SUBSET[weights], len(train)),
            independent_outputs=True,
            seed=judged.problem.seed,
        )
        torch.manual_seed(judged.problem.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of hooks that its backend sets
            model.fit(_loader(replace(train, inputs=train.inputs.to(dtype))))

        def predictions(X: Tensor) -> tuple[Tensor, Tensor]:
            """Return the logits of the probit approximation, and the sum of the variances."""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it computes anew after another prior precision
                # its public call returns probabilities alone; the variance is what a process has beyond them
                parts = [model._glm_predictive_distribution(part.to(dtype)) for part in X.split(200)]
            mean = torch.cat([part[0].detach().double() for part in parts])
            variance = torch.cat([part[1].detach().double().diagonal(dim1=1, dim2=2) for part in parts])
            return mean / (1 + torch.pi / 8 * variance).sqrt(), variance.sum(1)

        found = []
        for precision in PRIOR_PRECISIONS:
            model.prior_precision = precision
            scaled, _ = predictions(validation.inputs)
            if not scaled.isfinite().all():
                continue
            (factor,) = chosen_factors([scaled], validation.labels)
            found.append((float(F.cross_entropy(factor * scaled, validation.labels)), precision, factor))
        _, model.prior_precision, a = min(found)

        def judge(X: Tensor) -> Judgement:
            scaled, variance = predictions(X)
            return _judgement((a * scaled).softmax(1), logits(judged, X).argmax(1), variance=variance)

        return judge

    return fit


def _loader(data: Dataset) -> DataLoader:
    return DataLoader(TensorDataset(data.inputs, data.labels), batch_size=250)


# Gaussian processes on the labels of the training points


def rbf_process(features: Callable[[Judged], Callable[[Tensor], Tensor]], *, median: bool = False) -> Peer:
    """Judge by a process with an RBF kernel as by ours: label targets, all points, stacked with the network.

    Its lengthscale is chosen by marginal likelihood, or it is the median distance.
    """

    def fit(judged: Judged) -> Judge:
        of, train, validation = features(judged), training_data(judged), judged.validation
        train = train[torch.randperm(len(train), generator=judged.generator())[:MAX_EXACT]]
        X, generator = of(train.inputs), judged.generator()
        lengthscale = median_distance(X) if median else None
        gp = fit_rbf_process(X, train.labels, train.num_classes, generator, lengthscale=lengthscale)
        means, _ = gp.posterior(of(validation.inputs))
        a, b = chosen_factors([logits(judged, validation.inputs), means], validation.labels)

        def judge(X: Tensor) -> Judgement:
            z = logits(judged, X)
            mean, variance = gp.posterior(of(X))
            p = (a * z + b * mean).softmax(1)
            return Judgement(1 - p.gather(1, z.argmax(1, keepdim=True))[:, 0], {"variance": variance}, p)

        return judge

    return fit


def path_process(run: Callable[[epk.Trajectory], epk.Trajectory], **options: int) -> Peer:
    """Judge by `epk.UncertainClassifier` over a run made from the recorded one."""

    def fit(judged: Judged) -> Judge:
        model = epk.UncertainClassifier(run(judged.trajectory), **options)
        model.fit(judged.validation.inputs, judged.validation.labels)

        def judge(X: Tensor) -> Judgement:
            u = model.uncertainty(X)
            scores = {"variance": u.out_of_distribution.double(), "mutual information": u.mutual_information.double()}
            return Judgement(u.error.double(), scores, model.predict_proba(X).double())

        return judge

    return fit


# Distances


def neighbours(features: Callable[[Judged], Callable[[Tensor], Tensor]]) -> Peer:
    """Judge by the distance to the k-th training image (Sun et al. 2022), k by error detection on validation data."""

    def fit(judged: Judged) -> Judge:
        of, validation = features(judged), judged.validation
        known = F.normalize(of(judged.trajectory.inputs), dim=1)
        reach = [k for k in NUM_NEIGHBOURS if k <= len(known)]

        def distances(X: Tensor) -> Tensor:
            parts = F.normalize(of(X), dim=1).split(500)
            near = [torch.cdist(part, known).topk(reach[-1], largest=False).values for part in parts]
            return torch.cat(near)[:, [k - 1 for k in reach]]

        wrong = logits(judged, validation.inputs).argmax(1) != validation.labels
        scores = distances(validation.inputs)
        quality = [error_detection(scores[:, i], wrong).auroc or 0.5 for i in range(len(reach))]
        best = max(range(len(reach)), key=quality.__getitem__)

        def judge(X: Tensor) -> Judgement:
            value = distances(X)[:, best]
            return Judgement(value, {"distance": value})

        return judge

    return fit


def mahalanobis(judged: Judged) -> Judge:
    """Judge by the distance to the nearest class mean in hidden features (Lee et al. 2018)."""
    of, train = hidden(judged), training_data(judged)
    A = of(train.inputs)
    means = torch.stack([A[train.labels == c].mean(0) for c in range(train.num_classes)])
    covariance = torch.from_numpy(ledoit_wolf((A - means[train.labels]).numpy(), assume_centered=True)[0])
    factor = torch.linalg.cholesky(covariance + 1e-9 * covariance.trace() * torch.eye(len(covariance)))

    def whitened(B: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, B.mT, upper=False).mT

    def judge(X: Tensor) -> Judgement:
        value = torch.cdist(whitened(of(X)), whitened(means)).amin(1)
        return Judgement(value, {"distance": value})

    return judge


PEERS: dict[str, Peer] = {
    "softmax, as trained": as_trained,
    "softmax, tempered": softmax,
    "energy": energy,
    "Mahalanobis, hidden": mahalanobis,
    "kNN, hidden": neighbours(hidden),
    "kNN, pixels": neighbours(pixels),
    "RBF-GP, hidden": rbf_process(hidden),
    "RBF-GP, pixels": rbf_process(pixels),
    "RBF-GP, pixels, median length": rbf_process(pixels, median=True),
    "ensemble of 5": ensemble,
    "Laplace, last layer": laplace_last_layer,
    "Laplace, GP of last layer": laplace_process("last_layer"),
    "Laplace, GP of all weights": laplace_process("all"),
    "NTK-GP, last step": path_process(tangent_trajectory),
    "EPK-GP": path_process(lambda run: run),
}


def why_not(name: str, problem: Problem) -> str | None:
    """Say why a method cannot be run here, if so."""
    if name.startswith("Laplace") and not find_spec("laplace"):
        return f"{name}: laplace-torch is not installed"
    if name == "Laplace, GP of all weights" and (problem.network, problem.width > 64) == ("mlp", True):
        return f"{name}: an hour for a network of more than 100,000 weights"
    return None
