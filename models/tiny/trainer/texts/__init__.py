"""What the model learns from: texts, their vocabulary, a plain model of them to compare with."""
