// Stands in for TensorRT's library of its own plugins, which the Python module wants to be there and which nothing here
// uses.
extern "C" bool initLibNvInferPlugins(void*, const char*) { return true; }
