"""RPO: reward-aware preference optimisation (Sun et al. 2025, arXiv 2502.00203)."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import PositiveFloat
from torch import Tensor
from torch.nn.functional import logsigmoid

from easyrl.recipes.preference import SampledPairs
from easyrl.recipes.recipe import Terms


@dataclass(frozen=True)
class RPO(SampledPairs):
    r"""The margin of the policy's implicit rewards is brought to that of the explicit rewards.

    .. math::
        L = \frac{1}{P} \sum_x D\Big[ \beta \log \frac{\pi(y_w)}{\pi_{ref}(y_w)}
                 - \beta \log \frac{\pi(y_l)}{\pi_{ref}(y_l)}
            \,\Big\|\, \eta (r_w - r_l) \Big]

        D[a \| b] = \sigma(b) \log \frac{\sigma(b)}{\sigma(a)}
                  + (1 - \sigma(b)) \log \frac{1 - \sigma(b)}{1 - \sigma(a)}

    a sum over the P prompts of an optimizer step, of whose G responses w is the best and l the
    worst. D is the KL divergence KL(sigma(b) || sigma(a)) of two Bernoulli distributions, which the
    authors' code (NeMo-Aligner, ``rpo_bwd_kl``) calls backward. DPO, which has 1 for sigma(b),
    pulls a pair apart without end; here it rests at a = b.

    Defaults are those of Llama-Nemotron's online RPO (arXiv 2505.00949, §6.2), which does not say
    how a pair was chosen. With a beta so small a stays near 0, and the gradient is REINFORCE's with
    the advantages beta (sigma(eta (r_w - r_l)) - 1/2) and its negative.

    The equation is that of Nemotron-4 340B (arXiv 2406.11704). Neither that paper nor RPO's own was
    at hand: it was read in transcriptions and in NeMo-Aligner's code. So variants over more than
    two responses are left out, as are the forward and the squared distance.
    """

    beta: PositiveFloat = 1e-5
    reward_scale: PositiveFloat = 3.0  # eta

    def pair_losses(self, margins: Tensor, reward_margins: Tensor) -> Tensor:
        wanted = self.reward_scale * reward_margins
        log_p, log_q = logsigmoid(wanted), logsigmoid(-wanted)
        chosen = log_p.exp() * (log_p - logsigmoid(margins))
        return chosen + log_q.exp() * (log_q - logsigmoid(-margins))

    def metrics(self, logprobs: Tensor, entropy: Tensor, terms: Terms) -> dict[str, Tensor]:
        """Also the mean of the margin that is wanted, eta times that of the rewards."""
        said = super().metrics(logprobs, entropy, terms)
        _, reward_margins, _ = self._margins(logprobs, terms)
        said["wanted_margin_sum"] = self.reward_scale * reward_margins.sum()
        return said | {"wanted_margin_num": said["margin_num"]}
