import torch

from luffy.api import Completion, Engine, engine
from luffy.models.attention import PackedLayout
from luffy.models.forward import forward_hidden, head_weight_bias
from luffy.rollout.sampling import SamplingRows, sample


class SimpleEngine(Engine):
    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def generate(self, requests, progress=None):
        return [self.complete(request) for request in requests]

    def sync(self, version):
        """It uses the policy's own weights: there is nothing to copy."""

    def complete(self, request):
        device = next(self.model.parameters()).device
        rows, end = SamplingRows.of([request], device), request.sampling.eos_ids
        ids, log_probs = list(request.given_ids), []
        while len(log_probs) < request.sampling.max_tokens and (not log_probs or ids[-1] not in end):
            position = torch.tensor([len(ids)], device=device)
            token, log_prob = sample(self.logits(torch.tensor(ids, device=device)), rows, position)
            ids.append(int(token))
            log_probs.append(float(log_prob))
        finish = "stop" if ids[-1] in end else "length"
        return Completion(torch.tensor(ids[request.start :]), torch.tensor(log_probs), finish)

    def logits(self, ids):
        layout = PackedLayout([len(ids)], ids.device)
        hidden = forward_hidden(self.model, ids, layout.position_ids, layout)
        return torch.nn.functional.linear(hidden[-1:], *head_weight_bias(self.model))


@engine("simple")
def build(cfg, model, device, warn):
    return SimpleEngine(model)
