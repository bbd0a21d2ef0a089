"""What Top-W is: parameters, the literal algorithm, the draw. numpy only."""
