"""The temperature of labels: recovered where it is known, and refused where the labels do not determine it."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.softmax import calibrated_temperature
from gp_cases import C


def labelled(temperature, generator, n=4000):
    """Logits z, and labels drawn from softmax(z / temperature)."""
    mean = 3 * torch.randn(n, C, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(mean / temperature, -1), 1, generator=generator)[:, 0]
    return LogitPosterior(mean, torch.zeros(n, C, C, dtype=torch.float64)), labels


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_temperature_of_labels_is_recovered(temperature, generator):
    posterior, labels = labelled(temperature, generator)
    result = calibrated_temperature(posterior, labels, 2)
    assert result.value == pytest.approx(temperature, rel=0.1)
    assert result.after <= result.before
    shuffled = calibrated_temperature(posterior, labels.roll(1), 2) if temperature == 3.0 else None  # negative control
    assert shuffled is None or shuffled.value > 10 * temperature


def test_the_loss_is_the_negative_log_of_the_expected_probability(generator):
    posterior, labels = labelled(1.0, generator, n=50)
    A = torch.randn(50, C, C, generator=generator, dtype=torch.float64)
    posterior = LogitPosterior(posterior.mean, 0.3 * A @ A.mT)
    result = calibrated_temperature(posterior, labels, 512, torch.Generator().manual_seed(3))
    for T, loss in ((1.0, result.before), (result.value, result.after)):
        u = epk.softmax_uncertainty(posterior, 512, torch.Generator().manual_seed(3), temperature=T)
        p = u.mean.gather(1, labels[:, None])[:, 0]
        assert loss == pytest.approx(-float(p.log().mean()), abs=1e-10)


def test_labels_that_leave_the_temperature_open_are_refused(generator):
    posterior, labels = labelled(1.0, generator, n=20)
    with pytest.raises(ValueError, match="grows to the end of the range"):
        calibrated_temperature(posterior, posterior.mean.argmax(-1))
    with pytest.raises(ValueError, match=r"one entry per point: got shape \(19,\) for 20"):
        calibrated_temperature(posterior, labels[:-1])
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2"):
        calibrated_temperature(posterior, labels + 1)
