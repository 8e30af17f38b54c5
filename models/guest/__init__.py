"""A model without a latent cache as a guest of the latent pools: grouped-query attention."""
