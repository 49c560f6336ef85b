// Does to manifests on standard input what Argo CD's application controller does, with the engine that it uses for that,
// for the Application `platform`. $KUBECONFIG names the API server, and the arguments the namespaces that it watches.
//
//	argocd sync NAMESPACE ...                applies them, prunes what is its own and not among them, prints what it did
//	argocd sync-server-side NAMESPACE ...    the same with the sync option ServerSideApply
//	argocd diff NAMESPACE ...                prints whether each is as in Git, by the default three-way diff
//	argocd diff-structured NAMESPACE ...     the same as Argo CD compares with the sync option ServerSideApply
//	argocd diff-server-side NAMESPACE ...    the same by a server-side diff, in which webhooks take part
//	argocd tree NAMESPACE ...                prints each with what it owns, and its health
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/argoproj/argo-cd/gitops-engine/pkg/cache"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/diff"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/engine"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/health"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/sync"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/sync/common"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/utils/kube"
	"github.com/argoproj/argo-cd/gitops-engine/pkg/utils/tracing"
	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	application = "platform"
	// The field manager of Argo CD's server-side applies.
	manager = "argocd-controller"
	// Argo CD 3 recognises its objects by this annotation by default, earlier versions by this label. Here they have both.
	trackingAnnotation = "argocd.argoproj.io/tracking-id"
	trackingLabel      = "app.kubernetes.io/instance"
)

var log = logr.Discard()

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: argocd sync|sync-server-side|diff|diff-structured|diff-server-side|tree NAMESPACE ...")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := run(ctx, os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, command string, namespaces []string) error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	manifests, err := kube.SplitYAML(text)
	if err != nil {
		return err
	}
	for _, manifest := range manifests {
		track(manifest)
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	// The limits that Argo CD's application controller has by default.
	config.QPS, config.Burst = 50, 100
	live := cache.NewClusterCache(config, cache.SetLogr(log), cache.SetNamespaces(namespaces),
		cache.SetPopulateResourceInfoHandler(func(object *unstructured.Unstructured, _ bool) (any, bool) {
			return isTracked(object), isTracked(object)
		}))
	if err := live.EnsureSynced(); err != nil {
		return err
	}
	switch command {
	case "sync", "sync-server-side":
		return synchronize(ctx, config, live, manifests, command == "sync-server-side")
	case "diff", "diff-structured", "diff-server-side":
		return compare(config, live, manifests, command)
	case "tree":
		return tree(live, manifests)
	default:
		return fmt.Errorf("unknown command %q", command)
	}
}

// Marks a manifest as Argo CD does before it is compared or applied.
func track(object *unstructured.Unstructured) {
	annotations, labels := object.GetAnnotations(), object.GetLabels()
	if annotations == nil {
		annotations = map[string]string{}
	}
	if labels == nil {
		labels = map[string]string{}
	}
	key := kube.GetResourceKey(object)
	annotations[trackingAnnotation] =
		fmt.Sprintf("%s:%s/%s:%s/%s", application, key.Group, key.Kind, key.Namespace, key.Name)
	labels[trackingLabel] = application
	object.SetAnnotations(annotations)
	object.SetLabels(labels)
}

// Stricter than Argo CD, which ignores an ID that names another object.
func isTracked(object *unstructured.Unstructured) bool {
	return object.GetAnnotations()[trackingAnnotation] != "" || object.GetLabels()[trackingLabel] == application
}

func isManaged(resource *cache.Resource) bool {
	return resource.Info.(bool)
}

func synchronize(
	ctx context.Context, config *rest.Config, live cache.ClusterCache, manifests []*unstructured.Unstructured, serverSide bool,
) error {
	results, err := engine.NewEngine(config, live, engine.WithLogr(log)).Sync(ctx, manifests, isManaged, "revision", "",
		sync.WithLogr(log), sync.WithPrune(true), sync.WithManifestValidation(true),
		sync.WithServerSideApply(serverSide), sync.WithServerSideApplyManager(manager))
	if err != nil {
		return err
	}
	var failed []error
	for _, result := range results {
		// kubectl's message is like "configmap/flags created".
		words := strings.Fields(result.Message)
		fmt.Printf("%s %s\n", name(result.ResourceKey), words[len(words)-1])
		if result.Status == common.ResultCodeSyncFailed {
			failed = append(failed, errors.New(result.Message))
		}
	}
	return errors.Join(failed...)
}

func compare(
	config *rest.Config, live cache.ClusterCache, manifests []*unstructured.Unstructured, command string,
) error {
	managed, err := live.GetManagedLiveObjs(manifests, isManaged)
	if err != nil {
		return err
	}
	options := []diff.Option{diff.WithLogr(log), diff.WithGVKParser(live.GetGVKParser()), diff.WithManager(manager)}
	switch command {
	case "diff-structured":
		options = append(options, diff.WithStructuredMergeDiff(true))
	case "diff-server-side":
		kubectl := &kube.KubectlCmd{Log: log, Tracer: tracing.NopTracer{}}
		applier, cleanup, err := kubectl.ManageServerSideDiffDryRuns(config)
		if err != nil {
			return err
		}
		defer cleanup()
		options = append(options, diff.WithServerSideDiff(true), diff.WithIgnoreMutationWebhook(false),
			diff.WithServerSideDryRunner(diff.NewK8sServerSideDryRunner(applier)))
	}
	both := sync.Reconcile(manifests, managed, "", live)
	for i := range both.Target {
		result, err := diff.Diff(both.Target[i], both.Live[i], options...)
		if err != nil {
			return err
		}
		state := "Synced"
		if result.Modified {
			state = "OutOfSync"
		}
		object := both.Target[i]
		if object == nil {
			object = both.Live[i]
		}
		fmt.Printf("%s %s\n", name(kube.GetResourceKey(object)), state)
	}
	return nil
}

func tree(live cache.ClusterCache, manifests []*unstructured.Unstructured) error {
	var keys []kube.ResourceKey
	for _, manifest := range manifests {
		keys = append(keys, kube.GetResourceKey(manifest))
	}
	managed, err := live.GetManagedLiveObjs(manifests, isManaged)
	if err != nil {
		return err
	}
	for key, object := range managed {
		// Argo CD counts an object without a check of its health as healthy.
		state := health.HealthStatusHealthy
		status, err := health.GetResourceHealth(object, nil)
		if err != nil {
			return err
		}
		if status != nil {
			state = status.Status
		}
		fmt.Printf("%s %s\n", name(key), state)
	}
	live.IterateHierarchyV2(keys, func(resource *cache.Resource, _ map[kube.ResourceKey]*cache.Resource) bool {
		for _, owner := range resource.OwnerRefs {
			fmt.Printf("%s below %s\n", name(resource.ResourceKey()), owner.Name)
		}
		return true
	})
	return nil
}

func name(key kube.ResourceKey) string {
	return fmt.Sprintf("%s/%s/%s", key.Kind, key.Namespace, key.Name)
}
