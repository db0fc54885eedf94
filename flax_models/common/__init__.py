"""What both towers share, in NumPy alone: neither JAX nor PyTorch is imported.

- A tower's numbers: `config`, read by `config_json`; what sets the `families` apart.
- Its weights: `checkpoint` reads and writes them, `weights` gives them the form that both towers
  compute with, and the published one back.
- Its input: `images` become patches by an `image_config`, `videos` by a `video_config`, and both
  `resample`; `grid`, `buckets` and `layout` say how the tokens of a call lie, how many are padded
  and who attends to whom.
- `finite` tells of infinities and NaN; `memory` refuses what cannot fit; `errors` are those that
  bad files raise.
"""
