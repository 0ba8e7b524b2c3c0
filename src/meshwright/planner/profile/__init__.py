"""What a real module computes, op by op: one pass over tensors without data, repeated blocks once."""
