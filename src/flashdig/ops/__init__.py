"""Attention as operators of torch's dispatcher, for torch.compile, autograd and everything else
that looks at operators."""
