"""Steps of this machine's engine, predicted as the simulator predicts and then measured."""
