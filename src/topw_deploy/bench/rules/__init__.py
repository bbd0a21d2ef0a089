"""`topw bench rules`: the decoding loop of one model under every sampling rule and temperature."""
