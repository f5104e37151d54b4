"""A drafter from scratch, that starts from what the target already knows; and a trained one with another draft vocabulary.

Its layer begins as the target's last one, its head and final norm as the target's, and fc passes the highest aux state through. Query, key
and value weights on the embedding half begin at zero. What the target's layer does not offer (another kind of attention or MLP, another
size, quantised numbers) begins at random.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from eyas import vocab
from eyas.drafter import Drafter, DrafterShape, check_rope
from eyas.drafter_config import read_rope
from eyas.errors import EyasError
from eyas.target import Target

STD = 0.02
_PROJECTIONS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
_OUTPUT = "self_attn.o_proj.weight"
# drafter's name -> target's name within its last layer
_SAME = {
    "hidden_norm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
}


def fresh_drafter(
    target: Target,
    ids_D: Tensor,
    layers: Sequence[int],
    intermediate_size: int | None = None,
    max_position: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """A drafter for ``target``, without its embedding; random parts come from torch's default generator.

    Args:
        target: gives shape and weights.
        ids_D: its draft vocabulary, target token ids (``vocab.choose_vocab``).
        layers: the aux states it will read, lowest first.
        intermediate_size: of its MLP; None takes the target's. With another size the MLP begins at random.
        max_position: positions it can be used at; None takes the target's.
        dtype: of the weights.

    Raises:
        EyasError: a token is outside the target's vocabulary, or its tensors cannot be read.
    """
    if int(ids_D.min()) < 0 or int(ids_D.max()) >= target.shape.vocab_size:
        raise EyasError(f"the draft vocabulary has token {int(ids_D.max())}, {target.name} has {target.shape.vocab_size} tokens")
    drafter = Drafter(_shape(target, len(ids_D), len(layers), intermediate_size, max_position)).to(dtype)
    with torch.no_grad():
        _fill(drafter, target, dtype)
        drafter.lm_head.weight.copy_(target.lm_head(dtype)[ids_D])
        drafter.norm.weight.copy_(target.final_norm(dtype))
        drafter.d2t.copy_(vocab.offsets(ids_D))
        drafter.t2d.copy_(vocab.membership(ids_D, target.shape.vocab_size))
    return drafter


def with_vocab(drafter: Drafter, ids_E: Tensor, target: Target) -> Drafter:
    """The same drafter for the draft vocabulary ``ids_E`` (target token ids): kept tokens take their lm_head rows along, new ones start
    from the target's lm_head, moved alike (``vocab.reselect``). Without its embedding.
    """
    again = Drafter(drafter.shape.model_copy(update={"draft_vocab_size": len(ids_E)})).to(drafter.fc.weight.dtype)
    with torch.no_grad():
        own = dict(again.named_parameters())
        for name, weight in drafter.named_parameters():
            if name in own and name != "lm_head.weight":
                own[name].copy_(weight)
        head_VH = target.lm_head(drafter.lm_head.weight.dtype)
        again.lm_head.weight.copy_(vocab.reselect(drafter.lm_head.weight, drafter.draft_ids_D, ids_E, head_VH))
        again.d2t.copy_(vocab.offsets(ids_E))
        again.t2d.copy_(vocab.membership(ids_E, target.shape.vocab_size))
    return again


def with_positions(drafter: Drafter, max_position: int) -> Drafter:
    """The very same weights in a drafter that can be used at so many positions: rotary positions have no table to grow.

    Without its embedding.
    """
    with torch.device("meta"):
        longer = Drafter(drafter.shape.model_copy(update={"max_position": max_position}))
    longer.load_state_dict(drafter.state_dict(), assign=True)
    return longer


def _shape(target: Target, draft_vocab_size: int, num_aux: int, intermediate_size: int | None, max_position: int | None) -> DrafterShape:
    shape = target.shape
    return DrafterShape(
        hidden_size=shape.hidden_size,
        intermediate_size=intermediate_size or shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=draft_vocab_size,
        num_aux=num_aux,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        rope_scaling=_rope_scaling(target),
        max_position=max_position or shape.max_position,
    )


def _rope_scaling(target: Target) -> dict[str, object] | None:
    """The target's, so that its queries and keys keep their meaning; plain where a drafter cannot have it."""
    try:
        _, scaling, _ = read_rope(target.config.get("text_config", target.config))
        if scaling is not None:
            check_rope(scaling)
    except (EyasError, ValueError):
        return None
    return scaling


def _fill(drafter: Drafter, target: Target, dtype: torch.dtype) -> None:
    """Everything but head, final norm and vocabulary, in place."""
    hidden, own = drafter.shape.hidden_size, dict(drafter.midlayer.named_parameters())
    for weight in (drafter.fc.weight, drafter.lm_head.weight, *own.values()):
        if weight.dim() == 2:
            weight.normal_(std=STD)
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:].copy_(torch.eye(hidden, dtype=dtype))
    last = _last_layer(target, dtype)
    same = dict(_SAME)
    if all(name in last and last[name].shape == (own[name].shape[0], hidden) for name in _PROJECTIONS):
        for name in _PROJECTIONS:
            own[name][:, :hidden].zero_()
            own[name][:, hidden:].copy_(last[name])
        same |= {_OUTPUT: _OUTPUT}  # of other queries, keys and values (latent attention's) it would make large noise
    if all(name in last and last[name].shape == own[name].shape for name in _MLP):
        same |= {name: name for name in _MLP}
    for ours, theirs in same.items():
        if theirs in last and last[theirs].shape == own[ours].shape:
            own[ours].copy_(last[theirs])


def _last_layer(target: Target, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the target's last layer what the drafter's can begin from: never its experts, and no weight that is noise without its scale."""
    layer = target.shape.num_layers - 1
    names = set(target.layer_names(layer))
    plain = {name for name in names if not {f"{name}_scale", f"{name}_scale_inv"} & names}
    return target.layer_tensors(layer, dtype, plain & {*_PROJECTIONS, _OUTPUT, *_MLP, *_SAME.values()})
