"""What is compared, each behind one interface.

`kernels` are ours, `peers_torch` and `peers_jax` the strongest unfused baselines; `warm_up` makes
many of them compile at once, in threads or in processes. `towers` are ours and Hugging Face's,
`vllm` those within vLLM; `huggingface` loads Hugging Face's, and writes the random checkpoints that
all are loaded from. `encoders` take folders of photographs.
"""
