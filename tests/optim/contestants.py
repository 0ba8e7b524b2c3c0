"""The optimizers of the parity tables, built over named parameters."""

from meshwright.optim import CAME, Adafactor, GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit, Lamb, Muon

RANK = 3
GALORE = {"rank": RANK, "update_proj_gap": 7, "scale": 0.5, "proj_type": "std"}


def projected_and_others(parameters):
    projected = [p for p in parameters.values() if p.ndim == 2 and min(p.shape) > RANK]
    others = [p for p in parameters.values() if not (p.ndim == 2 and min(p.shape) > RANK)]
    return [group for group in ({"params": projected, **GALORE}, {"params": others}) if group["params"]]


def by_dims(parameters):
    matrices = [p for p in parameters.values() if p.ndim > 1]
    vectors = [p for p in parameters.values() if p.ndim == 1]
    groups = ({"params": matrices, "algorithm": "muon"}, {"params": vectors, "algorithm": "adamw"})
    return [group for group in groups if group["params"]]


BUILD = {
    "Lamb": lambda p: Lamb(list(p.values()), lr=3e-2, weight_decay=0.01),
    "GaLore": lambda p: GaLoreAdamW(projected_and_others(p), lr=3e-2, weight_decay=0.01),
    "Adafactor": lambda p: Adafactor(list(p.values()), lr=3e-2, relative_step=False, beta1=0.9, weight_decay=0.01),
    "CAME": lambda p: CAME(list(p.values()), lr=3e-2, weight_decay=0.01),
    "GaLore 8-bit": lambda p: GaLoreAdamW8bit(projected_and_others(p), lr=3e-2, min_8bit_size=16),
    "GaLore Adafactor": lambda p: GaLoreAdafactor(projected_and_others(p), lr=3e-2, relative_step=False),
    "Muon": lambda p: Muon(by_dims(p), lr=3e-2),
}
