"""What a model is made of, without running it: `ddpprobe.summary(model, *inputs)`."""
