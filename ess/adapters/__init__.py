"""Other engines that feed ESS workers, or run over ESS pools."""
