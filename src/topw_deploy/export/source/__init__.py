"""Where a model comes from: the hub, a folder, safetensors files, GPTQ and AWQ codes, embedding tables."""
