"""Masked autoencoder: the encoder gets a quarter of the patches, and the decoder reconstructs the rest.

    loss = mean over masked patches of |prediction - patch|^2 / pixels,   each patch normalised to mean 0, variance 1

In the plain version (He et al., arXiv 2111.06377) the decoder gets the last block's output. With long skips ("Residual
Connections Harm Generative Representation Learning", arXiv 2404.10947) it starts from positions only, and outputs of
evenly spaced encoder blocks, deepest first, are fused into the inputs of its blocks:

    x  <-  x + MLP(concat(encoder output with mask tokens, x)),   the MLP's last layer zero at the start

Decoder tokens stay in the random order, visible ones first: blocks do not depend on the order, and positions are looked
up by index. So no unshuffling is needed, and the loss uses a slice. Only visible patches are embedded, and only masked
ones predicted.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from unskip._extras import need
from unskip.errors import BadInput
from unskip.models._vit import Grid, checkpointed, grid_of, narrowed, positions, sources

_COLOUR = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation of ImageNet


class Reconstruction(NamedTuple):
    """The output of a forward pass. `order` (images, patches) has patch indices, visible ones first."""

    loss: Tensor
    prediction: Tensor  # (images, masked, patch * patch * channels), of the patches order[:, visible:]
    order: Tensor
    feature_norm: Tensor  # mean norm of the encoder's output tokens


class Fuse(nn.Module):
    """One long skip: fuses an encoder output, with a mask token for masked patches, into the stream."""

    def __init__(self, width: int, stream: int) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.up = nn.Linear(width + stream, stream)
        self.down = nn.Linear(stream, stream)

    def forward(self, stream: Tensor, output: Tensor) -> Tensor:
        # A linear layer of a concatenation is a sum, and the term of the mask token is equal for all masked patches.
        width = output.shape[2]
        of_output, of_stream = self.up.weight[:, :width], self.up.weight[:, width:]
        visible = F.linear(output, of_output)
        masked = F.linear(self.mask_token.to(output.dtype), of_output)
        masked = masked.expand(len(visible), stream.shape[1] - visible.shape[1], -1)
        hidden = torch.cat([visible, masked], 1) + F.linear(stream, of_stream, self.up.bias)
        fused: Tensor = self.down(F.silu(hidden))
        return stream + fused


class Decoder(nn.Module):
    """Transformer blocks over all patches, in any order."""

    positions: Tensor

    def __init__(
        self,
        grid: Grid,
        encoder_width: int,
        width: int,
        depth: int,
        heads: int,
        skips: tuple[int, ...],
        pixels: int,
        narrow: bool,
    ) -> None:
        super().__init__()
        Block = need("timm.models.vision_transformer").Block

        self.narrow, self.grad_checkpointing = narrow, False
        self.skips = skips  # the encoder block for each of the first decoder blocks
        if skips:
            self.cls_token = nn.Parameter(torch.zeros(1, grid.prefix, width))
            self.fuse: Any = nn.ModuleList(Fuse(encoder_width, width) for _ in skips)
        else:
            self.embed = nn.Linear(encoder_width, width)
            self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.register_buffer("positions", positions(grid, width))  # (patches, width)
        norm: Any = partial(nn.LayerNorm, eps=1e-6)
        self.blocks: Any = nn.ModuleList(Block(width, heads, 4.0, qkv_bias=True, norm_layer=norm) for _ in range(depth))
        self.norm = norm(width)
        self.head = nn.Linear(width, pixels)

    def forward(self, outputs: list[Tensor], order: Tensor, visible: int) -> Tensor:
        """Predicts the masked patches from encoder outputs, in the order of `skips`, or only the last one."""
        code = F.embedding(order, self.positions)  # (images, patches, width)
        prefix = outputs[0].shape[1] - visible
        if self.skips:
            x = torch.cat([self.cls_token.expand(len(order), -1, -1).to(code.dtype), code], 1)
        else:
            shown = self.embed(outputs[0])
            masked = self.mask_token.to(shown.dtype).expand(len(shown), order.shape[1] - visible, -1)
            patches = torch.cat([shown[:, prefix:], masked], 1) + code
            x = torch.cat([shown[:, :prefix].to(patches.dtype), patches], 1)
        x = narrowed(x) if self.narrow else x
        for index, block in enumerate(self.blocks):
            if index < len(self.skips):
                x = self.fuse[index](x, outputs[index])
            x = checkpointed(block, self.grad_checkpointing, x)
        prediction: Tensor = self.head(self.norm(x[:, prefix + visible :]))
        return prediction


class MAE(nn.Module):
    """A masked autoencoder with a timm ViT as encoder; `encoder` can be rewired, loaded and evaluated alone."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        *,
        width: int = 512,
        depth: int = 8,
        heads: int = 16,
        mask: float = 0.75,
        long_skips: bool = True,
        norm_pix: bool = True,
        narrow: bool = False,
    ) -> None:
        """`width`, `depth` and `heads` are the decoder's. Images in bytes are normalised with ImageNet's mean and
        standard deviation, or with 0.5 if they do not have three channels.

        Under autocast the streams are float32, because positions are; with `narrow` they have autocast's precision,
        which is faster and less exact.
        """
        super().__init__()
        grid = grid_of(encoder)
        self.visible = _visible(grid, mask)
        if heads < 1 or width % heads or width % 4:
            raise BadInput(
                f"the decoder's width is {width} with {heads} heads; it must be a multiple of 4 and of the heads"
            )
        if depth < 1:
            raise BadInput(f"the decoder has {depth} blocks; it needs at least one")
        self.encoder, self.grid, self.norm_pix, self.narrow = encoder, grid, norm_pix, narrow
        inner: Any = encoder
        skips = sources(len(inner.blocks), depth) if long_skips else ()
        if skips and not isinstance(inner.norm, nn.Identity):
            raise BadInput(
                "with long skips the encoder's last norm is not used; build the encoder with final_norm=False"
            )
        pixels = grid.patch**2 * grid.channels
        self.decoder = Decoder(grid, inner.embed_dim, width, depth, heads, skips, pixels, narrow)
        normalisation = _COLOUR if grid.channels == 3 else ((0.5,) * grid.channels, (0.5,) * grid.channels)
        for name, values in zip(("mean", "std"), normalisation, strict=True):
            self.register_buffer(name, torch.tensor(values) * 255, persistent=False)
        self.start_()

    @torch.no_grad()
    def start_(self) -> None:
        """MAE's initialisation: Xavier for linear layers, tokens with std 0.02, fixed sine-cosine positions."""
        inner: Any = self.encoder
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        kernel = inner.patch_embed.proj.weight
        nn.init.xavier_uniform_(kernel.view(len(kernel), -1))
        for name, token in self.named_parameters():
            if name.endswith(("cls_token", "mask_token", "reg_token")):
                nn.init.normal_(token, std=0.02)
        for fuse in self.decoder.fuse if self.decoder.skips else ():
            nn.init.zeros_(fuse.down.weight)
        if inner.pos_embed is not None:
            inner.pos_embed.zero_()
            inner.pos_embed[0, -self.grid.patches :] = positions(self.grid, inner.embed_dim)
            inner.pos_embed.requires_grad_(False)

    @torch.no_grad()
    def zero_start_(self) -> None:
        """Sets the decoder's branches and head to zero; for the encoder see `unskip.init.zero_branches_`."""
        lasts = [layer for block in self.decoder.blocks for layer in (block.attn.proj, block.mlp.fc2)]
        for layer in (*lasts, self.decoder.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Reconstruction:
        """Images are normalised floats or bytes. Patches with the lowest `noise` (images, patches) are visible."""
        if noise is None:
            noise = torch.rand(len(images), self.grid.patches, device=images.device)
        order = noise.argsort(1)
        shown, hidden = order[:, : self.visible], order[:, self.visible :]
        patches = self.patches(images)
        outputs = self.encode(_rows(patches, shown), shown)
        prediction = self.decoder([outputs[i] for i in self.decoder.skips] or outputs[-1:], order, self.visible)
        target = self.target(_rows(patches, hidden))
        loss = (prediction.float() - target).square().mean()
        length = outputs[-1].detach().float().norm(dim=2).mean()
        return Reconstruction(loss, prediction, order, length)

    def patches(self, images: Tensor) -> Tensor:
        """(images, channels, height, width) to (images, patches, patch * patch * channels), bytes as bytes."""
        grid = self.grid
        if images.shape[1:] != (grid.channels, grid.rows * grid.patch, grid.columns * grid.patch):
            raise BadInput(
                f"images are {tuple(images.shape[1:])}; the encoder takes "
                f"{(grid.channels, grid.rows * grid.patch, grid.columns * grid.patch)}"
            )
        split = images.reshape(len(images), grid.channels, grid.rows, grid.patch, grid.columns, grid.patch)
        return split.permute(0, 2, 4, 3, 5, 1).reshape(len(images), grid.patches, -1)

    def normalised(self, patches: Tensor) -> Tensor:
        """Normalises bytes by mean and standard deviation; floats are returned unchanged."""
        if patches.dtype != torch.uint8:
            return patches
        repeats = self.grid.patch**2
        return (patches.float() - self.mean.repeat(repeats)) / self.std.repeat(repeats)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.decoder.grad_checkpointing = enable

    def target(self, patches: Tensor) -> Tensor:
        """The decoder's target: pixels, normalised per patch with `norm_pix`."""
        values = self.normalised(patches).float()
        if not self.norm_pix:
            return values
        variance, mean = torch.var_mean(values, -1, keepdim=True)
        return (values - mean) / (variance + 1e-6).sqrt()

    def encode(self, patches: Tensor, where: Tensor) -> list[Tensor]:
        """The output of every encoder block (images, prefix + visible, dim), the last after the encoder's norm."""
        inner: Any = self.encoder
        kernel = inner.patch_embed.proj.weight
        weight = (kernel.permute(0, 2, 3, 1) if kernel.shape[1] > 1 else kernel).flatten(1)  # as `patches`
        x = F.linear(self.normalised(patches).to(weight.dtype), weight, inner.patch_embed.proj.bias)
        x = inner.patch_embed.norm(x)
        # The encoder's prefix tokens and positions, from zero patches.
        # Two rows: the gradient of a token expanded from one row is a view, for which DDP warns.
        shape = (2, self.grid.rows, self.grid.columns, -1) if inner.dynamic_img_size else (2, self.grid.patches, -1)
        base = inner._pos_embed(x.new_zeros(2 * self.grid.patches, x.shape[2]).view(shape))[0]
        learned = inner.pos_embed is not None and inner.pos_embed.requires_grad
        position = base[self.grid.prefix :] if learned else base[self.grid.prefix :].detach()
        x = x + F.embedding(where, position)
        x = torch.cat([base[: self.grid.prefix].expand(len(x), -1, -1).to(x.dtype), x], 1)
        x = inner.norm_pre(narrowed(x) if self.narrow else x)
        outputs = []
        for block in inner.blocks:
            x = checkpointed(block, self.decoder.grad_checkpointing, x)
            outputs.append(x)
        outputs[-1] = inner.norm(x)
        return outputs


def _visible(grid: Grid, mask: float) -> int:
    if not 0 < mask < 1:
        lost = "predict" if mask <= 0 else "encode"
        raise BadInput(f"a mask ratio of {mask} leaves nothing to {lost}; use one between 0 and 1, such as 0.75")
    visible = int(grid.patches * (1 - mask))
    if not 0 < visible < grid.patches:
        raise BadInput(
            f"mask {mask} leaves {visible} of {grid.patches} patches visible; change it, or use smaller patches"
        )
    return visible


def _rows(values: Tensor, where: Tensor) -> Tensor:
    """(images, patches, n) and (images, k) to (images, k, n)."""
    return values.gather(1, where[:, :, None].expand(-1, -1, values.shape[2]))
