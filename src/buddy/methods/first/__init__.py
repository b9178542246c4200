"""FiRST: routers by layer, fitted in two stages."""
