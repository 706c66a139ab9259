"""DFlash drafters: train, evaluate and export block-diffusion drafts for speculative decoding.

A library on files and tensors; it knows nothing of queues or services. Start with `dflash.train.train`,
`dflash.evaluate.evaluate` and `dflash.export.export_draft`, or the command line in `dflash.cli`.
"""
